"""Turns prompts into validated requests: tokenization, token ids, policies."""

from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import count
from operator import index as as_integer
from typing import Any

import numpy as np

from alula.engine.rollout import Prompt, Rollout, Sampling
from alula.engine.sequence import Request
from alula.engine.stop_strings import StopStrings, resolve_stops
from alula.errors import SettingError, require
from alula.models.chat_template import apply_chat_template
from alula.models.load import LoadedModel
from alula.settings import COLDEST, HOTTEST
from alula.sparsity.policy import DENSE, Sparsity, check_schedules


class InputProcessor:
    """Tokenizes prompts for a model and rejects invalid input. `page` is the engine's page size."""

    def __init__(self, loaded: LoadedModel, page: int) -> None:
        self.name, self.tokenizer, self.eos_ids = loaded.name, loaded.tokenizer, loaded.eos_ids
        self.vocabulary: int = loaded.model.config.vocab_size
        self.page = page
        self._ids = count()

    def next_id(self) -> int:
        return next(self._ids)

    def requests(
        self,
        prompts: Many[Prompt] | str,
        sampling: Sampling,
        sparsity: Sparsity | Many[Sparsity] | None,
        record: bool | Many[bool],
        keep_hidden: int | Many[int],
        indices: Many[int] | None = None,
    ) -> list[Request]:
        """One request per prompt; the first invalid input raises."""
        if isinstance(prompts, str):
            prompts = [prompts]
        require(len(prompts) > 0, "prompts: the list is empty.")
        require(
            not isinstance(prompts[0], (int, np.integer, dict)),
            "prompts: give a list of prompts; a single prompt of token ids or chat messages goes into a list too.",
        )
        require(isinstance(sampling, Sampling), f"sampling={sampling!r}: must be a Sampling, such as Sampling(n=8).")
        policies = per_prompt("sparsity", DENSE if sparsity is None else sparsity, len(prompts))
        for policy in policies:
            require(
                isinstance(policy, Sparsity),
                f"sparsity={policy!r}: must be a Sparsity, such as Sparsity.parse('rkv:512+128').",
            )
        for policy in set(policies):
            self.check_policy(policy)
        records = per_prompt("record", record, len(prompts))
        kept = per_prompt("keep_hidden", keep_hidden, len(prompts))
        numbers = per_prompt("indices", range(len(prompts)) if indices is None else indices, len(prompts))
        require(len(set(numbers)) == len(numbers), "indices: two prompts have the same index; give each another one.")
        stop, stop_strings = self.stops(sampling)
        self.check_topk("topk_logprobs", sampling.topk_logprobs)
        requests = []
        for index, (prompt, policy) in enumerate(zip(prompts, policies)):
            try:
                ids = self.tokenize(prompt)
            except TypeError:
                shown = f"prompt {index}, {str(prompt)[:40]!r}"
                raise SettingError(f"{shown}: must be text, chat messages or token ids.") from None
            require(len(ids) > 0, f"prompt {index} is empty; every prompt needs at least one token.")
            self.check_ids(f"prompt {index}", ids)
            request = Request(self.next_id(), ids, sampling, policy, stop, numbers[index])
            request.record, request.keep_hidden = records[index], kept[index]
            request.stop_strings = stop_strings
            requests.append(request)
        return requests

    def next_turn(self, before: Request, sampling: Sampling) -> Request:
        """The request of a session's next turn. Policy, prompt, key and records are the first turn's."""
        require(
            (sampling.filtered, sampling.topk_logprobs) == (before.sampling.filtered, before.sampling.topk_logprobs),
            "sampling: top_p, top_k and topk_logprobs of a session stay those of its first turn.",
        )
        sampling = replace(sampling, n=1, seed=before.sampling.seed)
        stop, stop_strings = self.stops(sampling)
        return replace(before, id=self.next_id(), sampling=sampling, stop=stop, stop_strings=stop_strings)

    def stops(self, sampling: Sampling) -> tuple[frozenset[int], StopStrings | None]:
        """Token ids and texts that end an answer."""
        stop, stop_strings = resolve_stops(sampling.stop, self.tokenizer)
        self.check_ids("stop", sorted(stop))
        return stop | (frozenset() if sampling.ignore_eos else frozenset(self.eos_ids)), stop_strings

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a string or of chat messages; token ids are returned as they are."""
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], dict)):
            if self.tokenizer is None:
                raise SettingError(f"{self.name} has no tokenizer; give prompts as lists of token ids.")
            if isinstance(prompt, str):
                return list(self.tokenizer(prompt)["input_ids"])
            require(
                bool(getattr(self.tokenizer, "chat_template", None)),
                f"{self.name} has no chat template; give prompts as text or token ids.",
            )
            return list(apply_chat_template(self.tokenizer, prompt, "prompts", return_dict=False))
        return [as_integer(token) for token in prompt]  # type: ignore[arg-type]

    def check_ids(self, name: str, ids: Many[int]) -> None:
        """Raise for token ids outside the vocabulary."""
        for token in (min(ids, default=0), max(ids, default=0)):
            require(
                0 <= token < self.vocabulary, f"{name} holds the token id {token}, outside 0..{self.vocabulary - 1}."
            )

    def check_topk(self, name: str, topk: int) -> None:
        require(
            0 <= topk <= self.vocabulary, f"{name}={topk}: must lie between 0 and the vocabulary's {self.vocabulary}."
        )

    def check_policy(self, sparsity: Sparsity) -> None:
        """Raise for a policy that does not fit the engine's page size or model."""
        if select := sparsity.select:
            require(
                select.block == self.page,
                f"select.block={select.block}: this engine's pages hold {self.page} tokens; "
                f"load it with page={select.block}.",
            )
        check_schedules(sparsity, self.name)

    def check_rollouts(self, rollouts: Many[Rollout], temperature: float | None) -> None:
        """Raise for rollouts that cannot be scored."""
        require(
            isinstance(rollouts, Many) and all(isinstance(r, Rollout) for r in rollouts),
            "rollouts: give a list of rollouts, as `generate` returns it; a single one goes into a list too.",
        )
        require(len(rollouts) > 0, "rollouts: the list is empty.")
        require(
            temperature is None or COLDEST <= temperature <= HOTTEST,
            f"temperature={temperature}: scoring needs a value between {COLDEST:g} and {HOTTEST:g}.",
        )
        for index, r in enumerate(rollouts):
            require(len(r) > 0, f"rollout {index} has no tokens to score.")
            self.check_ids(f"rollout {index}", r.prompt_ids + r.token_ids)


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value per prompt, from one value for all or from a list."""
    values = list(value) if isinstance(value, Many) and not isinstance(value, str) else [value] * count
    require(len(values) == count, f"{name}: {len(values)} values for {count} prompts; give one, or one per prompt.")
    return values

"""The longest sequences that a run can generate, and whether the model's positions and the KV pool hold them.

Every run checks this before its first step, under every policy it can reach; `--check` does so without an engine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from alula.config.run import RunConfig
from alula.data import Dataset
from alula.engine.rollout import Sampling
from alula.engine.schedule_plan import KVNeed
from alula.errors import require
from alula.models.geometry import max_positions
from alula.rollouts.job import Job
from alula.sparsity.policy import DENSE, Sparsity
from alula.trainer.run_data import Data


@dataclass(frozen=True)
class LongestPrompt:
    """The longest prompt of a data set, and the setting that limits its answer."""

    kind: str
    prompt: list[int]
    setting: str
    answer: int

    @classmethod
    def of(cls, kind: str, dataset: Dataset, config: RunConfig, section: str = "sampling") -> "LongestPrompt":
        prompt = max((list(example.prompt_ids or ()) for example in dataset), key=len)
        if config.environment is not None:
            prompt = prompt[: config.environment.max_tokens - 1]
            return cls(kind, prompt, "environment.max_tokens", config.most_generated(len(prompt)))
        answer = config.eval.max_new_tokens if section == "eval" else None
        if answer is None:
            section, answer = "sampling", config.sampling.max_new_tokens
        return cls(kind, prompt, f"{section}.max_new_tokens", answer)

    def __len__(self) -> int:
        return len(self.prompt) + self.answer

    def __str__(self) -> str:
        if self.setting == "environment.max_tokens":
            return f"a {self.kind} episode of {self.setting}={len(self)}"
        return f"the longest {self.kind} prompt of {len(self.prompt)} tokens with {self.setting}={self.answer}"

    @property
    def hint(self) -> str:
        if self.setting == "environment.max_tokens":
            return f"lower {self.setting}"
        return f"lower {self.setting}, or leave out long prompts with data.max_prompt_tokens"


def longest_prompts(config: RunConfig, training: Dataset, held_out: Sequence[Dataset]) -> list[LongestPrompt]:
    """Training prompts first, then held-out ones."""
    longest = [LongestPrompt.of("training", training, config)]
    if held_out:
        together = Dataset(tuple(example for one in held_out for example in one))
        longest.append(LongestPrompt.of("held-out", together, config, "eval"))
        if config.distill and config.distill.move:  # measured with answers as long as in training
            longest.append(LongestPrompt.of("held-out", held_out[0], config))
    return longest


def longest_sequence(config: RunConfig, model: PreTrainedConfig, training: Dataset, held_out: Sequence[Dataset]) -> int:
    """Tokens of the run's longest sequence. Raises if the model has fewer positions, under an evictor too: it holds few
    tokens, but the dense learner reads all of them. `engine.max_length` overrides the model's limit."""
    longest = max(longest_prompts(config, training, held_out), key=len)
    positions = max_positions(model)
    require(
        len(longest) <= max(positions, config.engine.max_length or 0),
        f"model.source={config.model.source!r} has max_position_embeddings={positions}, and {longest} comes to "
        f"{len(longest)}; {longest.hint}, or set engine.max_length={len(longest)} if the model can read that far.",
    )
    return len(longest)


def check_positions(config: RunConfig, model: PreTrainedConfig, data: Data | None) -> None:
    """Raise if a sequence has more tokens than the model has positions. Without `data`, check only the answers."""
    if data is not None:
        longest_sequence(config, model, *data)
        return
    answer = config.most_generated(0)
    setting = "environment.max_tokens" if config.environment else "sampling.max_new_tokens"
    positions = max_positions(model)
    require(
        answer < max(positions, config.engine.max_length or 0),
        f"{setting}={answer}: model.source={config.model.source!r} has "
        f"max_position_embeddings={positions}; lower it, or set engine.max_length if the model can read that far.",
    )


@dataclass(frozen=True)
class Policies:
    """The sparse policies that a run can reach."""

    sparsity: Sparsity
    densest: Sparsity
    """At the controller's largest budget."""
    candidate: Sparsity | None = None
    """The one that `distill.move` may switch to."""


KVNeedOf = Callable[[Job], KVNeed]


def check_kv_pool(
    config: RunConfig, need_of: KVNeedOf, policies: Policies, training: Dataset, held_out: Sequence[Dataset]
) -> None:
    """Raise if the engine would reject one of the run's prompts later."""
    longest = longest_prompts(config, training, held_out)
    for what, prompt, policy in generations(config, policies, longest):
        need = need_of(Job(prompt.prompt, Sampling(max_new_tokens=prompt.answer), policy))
        require(
            not need.exceeds_pool,
            f"engine.kv_memory={config.engine.kv_memory or 'null'} holds {need.max_pages} pages of {config.page} "
            f"tokens, and {what} ({policy.describe()}) of {prompt} need {need.pages}; raise it, {prompt.hint}.",
        )
        require(
            not need.exceeds_length,
            f"engine.max_length={config.engine.max_length}: {what} ({policy.describe()}) of {prompt} may hold "
            f"{need.tokens} KV tokens; raise it, {prompt.hint}.",
        )


def generations(
    config: RunConfig, policies: Policies, longest: list[LongestPrompt]
) -> Iterator[tuple[str, LongestPrompt, Sparsity]]:
    """Everything that the run generates: its name, its longest prompt, its policy."""
    training, *held_out = longest
    sparse = [("rollouts", policies.sparsity)]
    if policies.densest != policies.sparsity:
        sparse.append(("rollouts at the controller's largest budget", policies.densest))
    if policies.candidate:
        sparse.append(("rollouts after distill.move", policies.candidate))
        yield "measurements of distill.move", longest[-1], policies.candidate
    for what, policy in sparse:
        yield what, training, policy
    if config.objective.correction.reroll:
        yield "rerolls", training, DENSE
    if held_out:
        yield "evaluations", held_out[0], DENSE
        for _, policy in sparse if config.eval.sparse else ():
            yield "evaluations", held_out[0], policy

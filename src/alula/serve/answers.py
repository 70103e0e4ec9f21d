"""Answers of the generation routes, as JSON objects in the dialects of vLLM and OpenAI."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from starlette.responses import JSONResponse

from alula.engine.rollout import Rollout, Sampling
from alula.engine.stop_strings import StopStrings, answer_text

FINISH = {"stop": "stop", "length": "length", "aborted": "abort", "error": "error"}
"""Finish reasons by the engine's: `error` means that the model's output was not finite."""


class JSONAnswer(JSONResponse):
    """JSON, encoded several times faster than by `json`: answers with log-probs are long."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


@dataclass
class Turn:
    """The part of a rollout that this request sampled: all of it, or the last turn of a session."""

    rollout: Rollout
    start: int
    token_ids: list[int]

    @classmethod
    def of(cls, rollout: Rollout) -> "Turn":
        start = end = 0
        for span in rollout.spans:
            end += span.tokens
            if span.version is None:
                start = end
        return cls(rollout, start, rollout.token_ids[start:])

    @property
    def prompt_tokens(self) -> int:
        """In a session, all earlier turns are the prompt."""
        return len(self.rollout.prompt_ids) + self.start

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was not computed for this request: all but the given ones in a later turn."""
        given = [span.tokens for span in self.rollout.spans if span.version is None]
        return self.prompt_tokens - given[-1] if given else self.rollout.kv.cached_prompt_tokens

    @property
    def logprobs(self) -> list[float] | None:
        logprobs = self.rollout.logprobs
        return None if logprobs is None else logprobs[self.start :].tolist()

    @property
    def topk(self) -> tuple[Any, Any] | None:
        ids, values = self.rollout.topk_ids, self.rollout.topk_logprobs
        return None if ids is None or values is None else (ids[self.start :].numpy(), values[self.start :].numpy())

    def text(self, stops: StopStrings | None, tokenizer: Any) -> str:
        if self.start == 0 and self.rollout.text is not None:
            return self.rollout.text
        return answer_text(self.token_ids, self.rollout.finish, stops, tokenizer)


def kv_use(rollout: Rollout, session: str | None) -> dict[str, Any]:
    """`kv` of a choice: the policy, what it held, and which weights sampled."""
    kv = {key: round(value, 3) if isinstance(value, float) else value for key, value in vars(rollout.kv).items()}
    versions = sorted({span.version for span in rollout.spans if span.version is not None})
    answer = {"sparsity": rollout.sparsity.describe(), "policy_versions": versions, "saved": round(rollout.kv.saved, 4)}
    return answer | kv | ({} if session is None else {"session": session})


def usage(turns: Sequence[Turn]) -> dict[str, Any]:
    """Token counts of an answer. The n choices of a prompt count it once."""
    prompts = {turn.rollout.prompt_index: turn for turn in turns}
    prompt = sum(turn.prompt_tokens for turn in prompts.values())
    cached = sum(turn.cached_tokens for turn in prompts.values())
    completion = sum(len(turn.token_ids) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Names:
    """Names tokens in log-probs: by their text, or as `token_id:<id>`. A part of a character has no text, and its bytes
    are not given."""

    def __init__(self, tokenizer: Any | None, as_ids: bool) -> None:
        self.tokenizer = None if as_ids else tokenizer
        self._names: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        name = self._names.get(token)
        if name is None:
            text = "\ufffd" if self.tokenizer is None else self.tokenizer.decode([token])
            name = self._names[token] = f"token_id:{token}" if "\ufffd" in text else text
        return name

    def chat_logprobs(self, ids: list[int], logprobs: list[float], topk: Any | None) -> dict[str, Any]:
        """`logprobs` of chat and token answers."""
        content = []
        for i, (token, logprob) in enumerate(zip(ids, logprobs)):
            entry: dict[str, Any] = {"token": self(token), "logprob": logprob}
            entry |= self.bytes_of(entry["token"])
            entry["top_logprobs"] = [
                {"token": name, "logprob": value} | self.bytes_of(name) for name, value in self.top(topk, i)
            ]
            content.append(entry)
        return {"content": content}

    def bytes_of(self, name: str) -> dict[str, Any]:
        if self.tokenizer is None:
            return {}
        return {"bytes": None if name.startswith("token_id:") else list(name.encode())}

    def completion_logprobs(
        self, ids: list[int], logprobs: list[float], topk: Any | None, offsets: list[int]
    ) -> dict[str, Any]:
        """`logprobs` of text completions. `offsets` tell where the tokens begin in the text. As in OpenAI's and vLLM's,
        `top_logprobs` holds the sampled token besides the most likely ones."""
        names = [self(token) for token in ids]
        top = None
        if topk is not None:
            top = [{name: logprobs[i]} | dict(self.top(topk, i)) for i, name in enumerate(names)]
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def top(self, topk: Any | None, i: int) -> list[tuple[str, float]]:
        if topk is None:
            return []
        ids, values = topk
        pairs = zip(ids[i].tolist(), values[i].tolist())
        return [(self(token), value) for token, value in pairs if math.isfinite(value)]


def sampled_logprobs(ids: list[int], logprobs: list[float]) -> bytes:
    """JSON of `Names.chat_logprobs` for tokens by their ids, without alternatives: most of what a server writes in
    training. No object is built per token, which is faster and starts no garbage collection."""
    if not ids:
        return b'{"content":[]}'
    numbers = (to_json(part)[1:-1].split(b",") for part in (ids, logprobs))
    entry = b'{"token":"token_id:%b","logprob":%b,"top_logprobs":[]}'
    return b'{"content":[%b]}' % b",".join([entry % pair for pair in zip(*numbers)])


def with_field(json: bytes, name: str, value: bytes) -> bytes:
    """A JSON object that is not empty, with another field, whose value is JSON."""
    return b'%b,"%b":%b}' % (json[:-1], name.encode(), value)


def envelope(kind: str, name: str, model: str, choices: list[dict], turns: Sequence[Turn] | None) -> dict[str, Any]:
    """The object around choices; `usage` if all turns are given."""
    answer = {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": choices}
    return answer | ({} if turns is None else {"usage": usage(turns)})


def session_state(name: str | None, continued: bool) -> str | None:
    return None if name is None else "continued" if continued else "new"


def choice_index(prompt_index: int, sample_index: int, sampling: Sampling) -> int:
    return prompt_index * sampling.n + sample_index

"""Sampling settings, rollouts and scores: the engine's inputs and outputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from alula.errors import SettingError, named_settings, require, require_whole
from alula.settings import COLDEST, HOTTEST
from alula.sparsity.policy import DENSE, Sparsity

Finish = Literal["stop", "length", "error", "aborted"]
MOST_ROLLOUTS = 1 << 20
"""Rollouts per prompt: a limit far above any use, so that a typing error does not end in a full memory."""
Prompt = str | Sequence[int] | Sequence[dict[str, str]]


@named_settings
@dataclass(frozen=True)
class Sampling:
    """Sampling settings. `logprobs` refer to the full vocabulary at `temperature` (at 1 if it is 0)."""

    n: int = 1
    """Rollouts per prompt."""
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    """Stop tokens are suppressed before this many; their log-probs do not change."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    seed: int = 0
    stop: tuple[int | str, ...] = ()
    """Token ids and texts that end an answer, in addition to the model's end-of-sequence tokens. A text may lie across
    tokens: `Rollout.token_ids` then end with the token that completes it, and `Rollout.text` before it."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    topk_logprobs: int = 0
    """Return the ids and log-probs of the K most likely tokens at every position."""

    def __post_init__(self) -> None:
        require_whole(
            n=self.n,
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            top_k=self.top_k,
            seed=self.seed,
            topk_logprobs=self.topk_logprobs,
        )
        require(self.n >= 1, f"n={self.n}: ask for at least one rollout per prompt.")
        require(self.n <= MOST_ROLLOUTS, f"n={self.n}: ask for at most {MOST_ROLLOUTS:,} rollouts per prompt.")
        require(self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens}: must be at least 1.")
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens={self.min_new_tokens}: must lie between 0 and max_new_tokens={self.max_new_tokens}.",
        )
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            require(isinstance(value, Real) and not isinstance(value, bool), f"{name}={value!r}: must be a number.")
        require(
            self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST,
            f"temperature={self.temperature}: must be 0 (greedy), or lie between {COLDEST:g} and {HOTTEST:g}.",
        )
        require(0 < self.top_p <= 1, f"top_p={self.top_p}: must lie in (0, 1].")
        require(self.top_k >= 0, f"top_k={self.top_k}: must be 0 (off) or a number of tokens.")
        require(self.topk_logprobs >= 0, f"topk_logprobs={self.topk_logprobs}: must be 0 or above.")
        stops = tuple(self.stop) if isinstance(self.stop, Iterable) and not isinstance(self.stop, str) else (self.stop,)
        require_whole(**{f"stop[{i}]": stop for i, stop in enumerate(stops) if not isinstance(stop, str)})
        stops = tuple(stop if isinstance(stop, str) else int(stop) for stop in stops)
        require("" not in stops, "stop='': an empty text would end every answer; leave it out.")
        object.__setattr__(self, "stop", stops)

    @property
    def filtered(self) -> bool:
        """Whether top-p or top-k filter the distribution; no log-probs are returned then."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def scored_temperature(self) -> float:
        """The temperature that log-probs refer to."""
        return self.temperature or 1.0


@dataclass
class Span:
    """Consecutive tokens of a rollout that one policy version sampled, or that were given."""

    tokens: int
    version: int | None
    """The policy version that sampled them; None for given tokens."""


@dataclass
class KVUse:
    """KV cache use of one rollout. Tokens are counted per layer and head, bytes over all of them. Means are over the
    decode steps of sampled tokens."""

    peak_tokens: int = 0
    mean_tokens: float = 0.0
    """Tokens held."""
    dense_mean_tokens: float = 0.0
    """Tokens that the dense policy would have held."""
    mean_read_tokens: float = 0.0
    """Tokens that attention read in a sparse layer; below `mean_tokens` under a selector."""
    peak_pages: int = 0
    peak_bytes: int = 0
    mean_bytes: float = 0.0
    evictions: int = 0
    pages_freed: int = 0
    """Pages that its evictions released."""
    swaps: int = 0
    """Times that its KV was copied to host memory and back."""
    restarts: int = 0
    """Times that the rollout was computed again from its prompt because `swap_memory` was full."""
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV was found in the cache."""
    given_tokens: int = 0
    """Tokens computed together in later turns of a session: the given ones, and the last sampled one before them."""
    given_read_tokens: int = 0
    """KV tokens that they read, added up. They read all that is held, under a selector too."""

    @property
    def saved(self) -> float:
        """Fraction of the dense policy's KV tokens that was not held."""
        return saved_share(self.mean_tokens, self.dense_mean_tokens)


@dataclass
class Rollout:
    """One sampled completion of a prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    """The answer's tokens, the stop token included."""
    logprobs: Tensor | None
    """float32 [tokens]: log-prob of each token under the policy that sampled it, NaN for given tokens; None under top-p
    or top-k."""
    finish: Finish
    """`stop`, `length`, `error` (non-finite logits) or `aborted`."""
    kv: KVUse = field(default_factory=KVUse)
    policy_version: int = 0
    """The policy version when the rollout ended."""
    spans: list[Span] = field(default_factory=list)
    """Which policy version sampled which tokens, in order."""
    request_id: int = -1
    """The request that it answers, by the id that `Engine.submit` returned."""
    session: int | None = None
    """The open session's id, for `Engine.extend`; None if the KV was not kept."""
    prompt_index: int = 0
    """The prompt's index, which keys its random numbers."""
    sample_index: int = 0
    """The rollout's number among the `n` of its prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    sparsity: Sparsity = DENSE
    """The policy that sampled it."""
    text: str | None = None
    """The answer as text, up to a stop text; None without a tokenizer."""
    reward: float | None = None
    """The sum of an environment's rewards, if one answered the policy's turns."""
    topk_ids: Tensor | None = None
    """[tokens, K]: the most likely tokens, with `Sampling.topk_logprobs`."""
    topk_logprobs: Tensor | None = None
    acceptance: Tensor | None = None
    """float32 [tokens]: Σ_v min(p_dense, p_sparse) at each token, if measured (`Engine.acceptance`)."""
    hidden: Tensor | None = None
    """[tokens, width]: the hidden state that each token was sampled from, if the request kept them."""
    history: Tensor | None = None
    """int32 [layer, kv_head, position]: `evicted_at`. The key at position j is visible to the query at position t
    if j <= t < evicted_at[j]. Recorded on request."""
    selected: list[list[Tensor | None]] | None = None
    """Per decode step (the first token comes with the prompt) and layer: int32 [kv_head, blocks], the indices of the
    cached blocks that were read; None for a layer that read all. Recorded on request."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> Tensor:
        """bool [tokens]: which tokens were sampled, not given."""
        if all(span.version is not None for span in self.spans):
            return torch.ones(len(self), dtype=torch.bool)
        return torch.tensor([span.version is not None for span in self.spans for _ in range(span.tokens)])

    @property
    def sampled_tokens(self) -> int:
        """The number of sampled tokens, without given ones."""
        return len(self) - sum(span.tokens for span in self.spans if span.version is None)

    @property
    def versions(self) -> Tensor:
        """int64 [sampled tokens]: the policy version that sampled each."""
        return torch.tensor(
            [span.version for span in self.spans if span.version is not None for _ in range(span.tokens)],
            dtype=torch.int64,
        )

    def answer(self) -> str:
        """`text`; raises if the engine had no tokenizer."""
        if self.text is None:
            raise SettingError("the rollout has no text, since its engine has no tokenizer; load a model with one.")
        return self.text

    def sampler_logprobs(self) -> Tensor:
        """`logprobs`; raises for tokens sampled with top-p or top-k, which have none."""
        if self.logprobs is None:
            raise SettingError(
                f"top_p={self.sampling.top_p}, top_k={self.sampling.top_k}: tokens from a filtered distribution have "
                "no log-prob under the policy; sample with top_p=1 and top_k=0 if log-probs are needed."
            )
        return self.logprobs


def kv_tokens(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """KV tokens held in all decode steps together, and those that the dense policy would have held."""
    held = sum(rollout.kv.mean_tokens * rollout.sampled_tokens for rollout in rollouts)
    dense = sum(rollout.kv.dense_mean_tokens * rollout.sampled_tokens for rollout in rollouts)
    return held, dense


def saved_share(held: float, dense: float) -> float:
    """Share of the dense policy's KV tokens that was not held; 0 if there were none."""
    return 1 - held / dense if dense else 0.0


@dataclass
class Scores:
    """Log-probs of a rollout's tokens under a policy."""

    logprobs: Tensor
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None
    history: Tensor | None = None
    selected: list[list[Tensor | None]] | None = None
    """`history` and `selected` as in `Rollout`, recorded on request."""


NEVER = torch.iinfo(torch.int32).max
"""`evicted_at` of a token that was never evicted."""

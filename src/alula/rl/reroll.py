"""Reroll: a vetoed rollout is generated again, densely, from its first vetoed token on."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from alula.engine.engine import Engine
from alula.engine.rollout import KVUse, Rollout
from alula.engine.sequence import Request
from alula.sparsity.policy import DENSE


def continuations(engine: Engine, rollouts: Mapping[int, tuple[Rollout, int]], seed: int) -> list[Request]:
    """A dense request for each (rollout, first vetoed token), known by its key in `prompt_index`.

    The prefix becomes part of the prompt, so its KV is whole again; as many tokens may follow as were left.
    """
    requests = []
    for index, (rollout, first) in rollouts.items():
        left = rollout.sampling.max_new_tokens - first
        sampling = replace(rollout.sampling, n=1, max_new_tokens=left, seed=seed + index)
        [request] = engine.requests([rollout.prompt_ids + rollout.token_ids[:first]], sampling, DENSE)
        request.prompt_index = index
        requests.append(request)
    return requests


def spliced(rollout: Rollout, first: int, suffix: Rollout, tokenizer: object) -> Rollout:
    """The prefix as the sparse policy sampled it, the suffix as the dense one did, each with its own log-probs."""
    tokens = rollout.token_ids[:first] + suffix.token_ids
    return replace(
        rollout,
        token_ids=tokens,
        logprobs=torch.cat([rollout.sampler_logprobs()[:first], suffix.sampler_logprobs()]),
        finish=suffix.finish,
        text=tokenizer.decode(tokens, skip_special_tokens=True),  # type: ignore[attr-defined]
        kv=kv_of_both(rollout, first, suffix),
    )


def kv_of_both(rollout: Rollout, first: int, suffix: Rollout) -> KVUse:
    """Means over the answer's own tokens; what the discarded suffix held is not in them."""
    sparse, dense = rollout.kv, suffix.kv
    whole = len(rollout.prompt_ids) + (first + 1) / 2  # what the dense policy holds, on average, over the prefix

    def mean(before: float, after: float) -> float:
        return (min(before, whole) * first + after * len(suffix)) / max(first + len(suffix), 1)

    held = mean(sparse.mean_tokens, dense.mean_tokens)
    return KVUse(
        peak_tokens=max(sparse.peak_tokens, dense.peak_tokens),
        mean_tokens=held,
        dense_mean_tokens=mean(whole, dense.dense_mean_tokens),
        mean_read_tokens=mean(sparse.mean_read_tokens, dense.mean_read_tokens),
        peak_pages=max(sparse.peak_pages, dense.peak_pages),
        peak_bytes=max(sparse.peak_bytes, dense.peak_bytes),
        mean_bytes=held * dense.peak_bytes / max(dense.peak_tokens, 1),
        evictions=sparse.evictions,
        pages_freed=sparse.pages_freed,
        swaps=sparse.swaps + dense.swaps,
    )

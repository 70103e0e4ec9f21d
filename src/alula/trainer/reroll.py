"""Reroll: regenerate a vetoed rollout densely from its first vetoed token."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from alula.engine.engine import Engine
from alula.engine.rollout import KVUse, Rollout
from alula.engine.sequence import Request, rollout_key
from alula.sparsity.policy import DENSE


def continuations(engine: Engine, rollouts: Mapping[int, tuple[Rollout, int]], seed: int) -> list[Request]:
    """A dense request for each (rollout, first vetoed token), with its key as `prompt_index`.

    The prefix becomes part of the prompt, so its KV is complete again. The limit on new tokens is what was left.
    """
    requests = []
    for index, (rollout, first) in rollouts.items():
        left = rollout.sampling.max_new_tokens - first
        sampling = replace(rollout.sampling, n=1, max_new_tokens=left, seed=seed)
        [request] = engine.requests([rollout.prompt_ids + rollout.token_ids[:first]], sampling, DENSE, indices=[index])
        request.key = rollout_key(seed, rollout.prompt_index, rollout.sample_index)
        requests.append(request)
    return requests


def spliced(rollout: Rollout, first: int, suffix: Rollout, tokenizer: object) -> Rollout:
    """The prefix from the sparse policy and the suffix from the dense one, each with its own log-probs."""
    tokens = rollout.token_ids[:first] + suffix.token_ids
    return replace(
        rollout,
        token_ids=tokens,
        logprobs=torch.cat([rollout.sampler_logprobs()[:first], suffix.sampler_logprobs()]),
        finish=suffix.finish,
        text=tokenizer.decode(tokens, skip_special_tokens=True),  # type: ignore[attr-defined]
        kv=spliced_kv(rollout, first, suffix),
    )


def spliced_kv(rollout: Rollout, first: int, suffix: Rollout) -> KVUse:
    """KV use of the spliced answer: means over its tokens, without those of the discarded suffix."""
    sparse, dense = rollout.kv, suffix.kv
    dense_prefix = len(rollout.prompt_ids) + (first + 1) / 2  # mean tokens that a dense policy holds over the prefix

    def mean(before: float, after: float) -> float:
        return (min(before, dense_prefix) * first + after * len(suffix)) / max(first + len(suffix), 1)

    held = mean(sparse.mean_tokens, dense.mean_tokens)
    return KVUse(
        peak_tokens=max(sparse.peak_tokens, dense.peak_tokens),
        mean_tokens=held,
        dense_mean_tokens=mean(dense_prefix, dense.dense_mean_tokens),
        mean_read_tokens=mean(sparse.mean_read_tokens, dense.mean_read_tokens),
        peak_pages=max(sparse.peak_pages, dense.peak_pages),
        peak_bytes=max(sparse.peak_bytes, dense.peak_bytes),
        mean_bytes=held * dense.peak_bytes / max(dense.peak_tokens, 1),
        evictions=sparse.evictions,
        pages_freed=sparse.pages_freed,
        swaps=sparse.swaps + dense.swaps,
    )

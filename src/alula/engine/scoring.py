"""Log-probs of given tokens under the dense policy (one packed pass) or a sparse one (forced decoding)."""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from alula.engine.rollout import Rollout, Scores
from alula.engine.rows import rollout_key
from alula.engine.sequence import Request
from alula.sparsity.policy import Sparsity

if TYPE_CHECKING:
    from alula.engine.engine import Engine

LOGITS_BYTES = 1 << 28
"""Logits exist for this many bytes' worth of tokens at a time."""


@torch.inference_mode()
def score_dense(engine: "Engine", rollouts: Many[Rollout], topk: int, temperature: float | None) -> list[Scores]:
    runner, out = engine.runner, []
    for batch in batches(rollouts, engine.prefill_tokens):
        hidden = runner.forward_packed([r.prompt_ids + r.token_ids for r in batch])
        start = 0
        for r in batch:
            # the token at position p is predicted by the hidden state at p - 1
            first = start + len(r.prompt_ids) - 1
            scale = temperature if temperature is not None else r.sampling.scored_temperature
            out.append(score_tokens(engine, hidden[first : first + len(r)], r.token_ids, topk, scale))
            start += len(r.prompt_ids) + len(r)
    return [Scores(*(None if x is None else x.cpu() for x in parts)) for parts in out]  # type: ignore[arg-type]


def score_tokens(engine: "Engine", hidden: torch.Tensor, ids: list[int], topk: int, temperature: float) -> tuple:
    targets = torch.tensor(ids, device=hidden.device)
    step = max(1, LOGITS_BYTES // (4 * engine.model.config.vocab_size))
    logprobs, top_ids, top_values = [], [], []
    for i in range(0, len(targets), step):
        logits = engine.runner.logits(hidden[i : i + step]) / temperature
        norm = logits.logsumexp(-1, keepdim=True)
        logprobs.append((logits.gather(-1, targets[i : i + step, None]) - norm)[:, 0])
        if topk:
            top = logits.topk(topk)
            top_ids.append(top.indices)
            top_values.append(top.values - norm)
    return (torch.cat(logprobs), torch.cat(top_ids) if topk else None, torch.cat(top_values) if topk else None)


def batches(rollouts: Many[Rollout], tokens: int) -> Iterator[list[Rollout]]:
    batch: list[Rollout] = []
    held = 0
    for r in rollouts:
        length = len(r.prompt_ids) + len(r)
        if batch and held + length > tokens:
            yield batch
            batch, held = [], 0
        batch.append(r)
        held += length
    yield batch


def score_forced(
    engine: "Engine", rollouts: Many[Rollout], sparsity: Sparsity, topk: int, temperature: float | None, record: bool
) -> list[Scores]:
    """Decode the same tokens again under `sparsity`: what each would have been given."""
    requests = []
    for index, r in enumerate(rollouts):
        sampling = replace(
            r.sampling, n=1, max_new_tokens=len(r), min_new_tokens=0, top_p=1.0, top_k=0, topk_logprobs=topk,
            temperature=temperature if temperature is not None else r.sampling.scored_temperature,
        )  # fmt: skip
        key = rollout_key(r.sampling.seed, r.prompt_index, r.sample_index)  # `random` evicts what it evicted then
        requests.append(
            Request(next(engine._ids), r.prompt_ids, sampling, sparsity, frozenset(), index, r.token_ids, record, key)
        )
    scores: list[Scores | None] = [None] * len(requests)
    for done in engine.stream(requests):
        assert done.logprobs is not None
        scores[done.prompt_index] = Scores(
            done.logprobs, done.topk_ids, done.topk_logprobs, done.history, done.selected
        )
    return [s for s in scores if s is not None]

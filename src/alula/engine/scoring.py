"""Log-probs of given tokens under the dense policy (one packed pass) or a sparse one (forced decoding), and the
acceptance between the two."""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alula.engine.model_runner import LOGITS_BYTES
from alula.engine.prefill import forward_packed
from alula.engine.rollout import KVUse, Rollout, Scores
from alula.engine.sequence import Request, Teacher, rollout_key
from alula.errors import require
from alula.ops.acceptance import chunked_acceptance
from alula.sparsity.policy import Sparsity

if TYPE_CHECKING:
    from alula.engine.engine import Engine

TEACHER_BYTES = 1 << 32
"""Dense hidden states larger than this are kept in host memory."""


@torch.inference_mode()
def score_dense(engine: "Engine", rollouts: Many[Rollout], topk: int, temperature: float | None) -> list[Scores]:
    scores = []
    for batch in batches(rollouts, engine.prefill_tokens if not engine.pinned else 1):
        hidden = forward_packed(engine.runner, [r.prompt_ids + r.token_ids for r in batch])
        start = 0
        for r in batch:
            # the token at position p is predicted by the hidden state at p - 1
            first = start + len(r.prompt_ids) - 1
            scale = temperature if temperature is not None else r.sampling.scored_temperature
            scores.append(score_tokens(engine, hidden[first : first + len(r)], r.token_ids, topk, scale))
            start += len(r.prompt_ids) + len(r)
    return [Scores(*(None if x is None else x.cpu() for x in parts)) for parts in scores]  # type: ignore[arg-type]


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
    """Consecutive rollouts of at most `tokens` tokens together."""
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
    """Log-probs of the same tokens when decoded again under `sparsity`; NaN for given ones of later turns."""
    requests = [forced_request(engine, r, i, sparsity, topk, temperature, record) for i, r in enumerate(rollouts)]
    scores: list[Scores | None] = [None] * len(requests)
    for done in engine.stream(requests):
        length = len(rollouts[done.prompt_index])
        top_ids = None if done.topk_ids is None else padded(done.topk_ids, length, 0)
        top = None if done.topk_logprobs is None else padded(done.topk_logprobs, length)
        scores[done.prompt_index] = Scores(padded(done.logprobs, length), top_ids, top, done.history, done.selected)
    return [s for s in scores if s is not None]


def forced_request(
    engine: "Engine",
    r: Rollout,
    index: int,
    sparsity: Sparsity,
    topk: int = 0,
    temperature: float | None = None,
    record: bool = False,
    teacher: Teacher | None = None,
) -> Request:
    """A request that decodes a rollout's tokens again, those of later turns as in a session; `index` comes back as
    `prompt_index`."""
    sampling = replace(
        r.sampling,
        n=1,
        max_new_tokens=len(r),
        min_new_tokens=0,
        top_p=1.0,
        top_k=0,
        topk_logprobs=topk,
        temperature=temperature if temperature is not None else r.sampling.scored_temperature,
    )
    key = rollout_key(
        r.sampling.seed, r.prompt_index, r.sample_index
    )  # the random evictor evicts the same tokens again
    return Request(
        engine.inputs.next_id(),
        r.prompt_ids,
        sampling,
        sparsity,
        frozenset(),
        index,
        r.token_ids,
        tuple(given_stretches(r)),
        record,
        key,
        teacher,
    )


def given_stretches(r: Rollout) -> Iterator[tuple[int, int]]:
    """Positions (first, last + 1) of given tokens, each with the token before it, if any are sampled after them."""
    start = 0
    for span in r.spans:
        stop = start + span.tokens
        if span.version is None and stop < len(r):
            yield len(r.prompt_ids) + max(0, start - 1), len(r.prompt_ids) + stop
        start = stop


def stream_acceptance(
    engine: "Engine",
    rollouts: Many[Rollout],
    sparsity: Sparsity | Many[Sparsity],
    temperature: float | None = None,
) -> Iterator[tuple[int, Tensor, KVUse]]:
    """(index, α [tokens], KV use) of every rollout as it finishes, roughly in the given order (`Engine.acceptance`)."""
    engine.inputs.check_rollouts(rollouts, temperature)
    policies = [sparsity] * len(rollouts) if isinstance(sparsity, Sparsity) else list(sparsity)
    require(
        len(policies) == len(rollouts),
        f"sparsity: {len(policies)} policies for {len(rollouts)} rollouts; give one, or one per rollout.",
    )
    for policy in set(policies):
        engine.check(policy)
    distinct = list({id(r): r for r in rollouts}.values())
    teacher_of = dict(zip(map(id, distinct), teachers(engine, distinct)))
    requests = [
        forced_request(engine, r, i, policy, temperature=temperature, teacher=teacher_of[id(r)])
        for i, (r, policy) in enumerate(zip(rollouts, policies))
    ]
    for done in engine.stream(requests):
        yield done.prompt_index, padded(done.acceptance, len(rollouts[done.prompt_index])), done.kv


def padded(values: Tensor | None, length: int, value: float = math.nan) -> Tensor:
    """`values` padded with NaN to `length`: logits that are not finite end the decoding early."""
    values = torch.empty(0) if values is None else values
    missing = values.new_full((length - len(values), *values.shape[1:]), value)
    return torch.cat([values, missing]) if len(missing) else values


@torch.inference_mode()
def score_kept(
    engine: "Engine", rollouts: Many[Rollout], temperature: float | None = None
) -> list[tuple[Tensor, Scores]]:
    """α [tokens] and dense log-probs of rollouts that kept their hidden states, from one dense packed pass."""
    engine.inputs.check_rollouts(rollouts, temperature)
    head, chunk = engine.runner.logits, max(1, LOGITS_BYTES // (4 * engine.model.config.vocab_size))
    results = []
    for r, teacher in zip(rollouts, teachers(engine, rollouts)):
        assert r.hidden is not None
        dense = teacher.hidden[teacher.start : teacher.start + len(r)].to(engine.device)
        scale = temperature if temperature is not None else r.sampling.scored_temperature
        alpha = chunked_acceptance(dense, head, r.hidden.to(engine.device), head, temperature=scale, chunk=chunk)
        results.append((alpha.cpu(), Scores(score_tokens(engine, dense, r.token_ids, 0, scale)[0].cpu())))
    return results


@torch.inference_mode()
def teachers(engine: "Engine", rollouts: Many[Rollout]) -> list[Teacher]:
    """Dense hidden states that predict the rollouts' tokens, in one tensor."""
    width, total = engine.model.config.hidden_size, sum(map(len, rollouts))
    fits = total * width * engine.dtype.itemsize <= TEACHER_BYTES
    hidden = torch.empty(total, width, dtype=engine.dtype, device=engine.device if fits else "cpu")
    result, offset = [], 0
    for batch in batches(rollouts, engine.prefill_tokens if not engine.pinned else 1):
        packed, start = forward_packed(engine.runner, [r.prompt_ids + r.token_ids for r in batch]), 0
        for r in batch:
            first = start + len(r.prompt_ids) - 1
            hidden[offset : offset + len(r)] = packed[first : first + len(r)]
            result.append(Teacher(hidden, offset))
            start, offset = start + len(r.prompt_ids) + len(r), offset + len(r)
    return result

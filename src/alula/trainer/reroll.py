"""Reroll: regenerate a vetoed rollout densely from its first vetoed token."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from alula.data import Example
from alula.engine.rollout import KVUse, Rollout, Sampling, Span
from alula.engine.stop_strings import answer_text, resolve_stops
from alula.environments.episodes import Episode, Start
from alula.rollouts.job import Job
from alula.sparsity.policy import DENSE


def continuations(rollouts: Mapping[int, tuple[Rollout, int]], seed: int) -> list[Job]:
    """A dense job for each (rollout, first vetoed token).

    The prefix becomes part of the prompt, so its KV is complete again. The limit on new tokens is what was left.
    """
    return [
        Job(
            rollout.prompt_ids + rollout.token_ids[:first],
            replace(rollout.sampling, n=1, max_new_tokens=rollout.sampling.max_new_tokens - first, seed=seed),
            DENSE,
            rollout.prompt_index,
            sample_index=rollout.sample_index,
            answered=first,
        )
        for rollout, first in rollouts.values()
    ]


def restarts(
    rollouts: Mapping[int, tuple[Rollout, int]], seeds: Sequence[int], examples: Sequence[Example], sampling: Sampling
) -> list[Job]:
    """The same for episodes: their environment is reset and gets the turns before the vetoed token again."""
    jobs = []
    for index, (episode, first) in rollouts.items():
        assert isinstance(episode, Episode)
        turns = [turn for turn in episode.turns if turn.start <= first]
        start = Start(
            examples[index].record(),
            seeds[index],
            episode.prompt_index,
            episode.sample_index,
            replay=turns[:-1],
            prefix=episode.token_ids[:first],
            turn_prefix=first - turns[-1].start,
        )
        jobs.append(Job((), sampling, DENSE, episode.prompt_index, start=start))
    return jobs


def spliced(rollout: Rollout, first: int, suffix: Rollout, tokenizer: object) -> Rollout:
    """The prefix from the sparse policy and the suffix from the dense one, each with its own log-probs."""
    tokens = rollout.token_ids[:first] + suffix.token_ids
    joined = replace(
        rollout,
        token_ids=tokens,
        logprobs=torch.cat([rollout.sampler_logprobs()[:first], suffix.sampler_logprobs()]),
        spans=[*spans_before(rollout.spans, first), *suffix.spans],
        finish=suffix.finish,
        kv=spliced_kv(rollout, first, suffix),
    )
    if not isinstance(suffix, Episode):
        stops = resolve_stops(rollout.sampling.stop, tokenizer)[1]
        return replace(joined, text=answer_text(tokens, suffix.finish, stops, tokenizer))
    assert isinstance(rollout, Episode)
    assert isinstance(joined, Episode)
    kept = len([turn for turn in rollout.turns if turn.start <= first])
    if len(suffix.turns) < kept:  # the replay failed
        waited = rollout.waited + suffix.waited
        return replace(joined, reward=0.0, turns=rollout.turns[:kept], failure=suffix.failure, waited=waited)
    turns = rollout.turns[:kept] + [replace(turn, start=first + turn.start) for turn in suffix.turns[kept:]]
    turns[kept - 1] = replace(suffix.turns[kept - 1], start=turns[kept - 1].start)
    return replace(
        joined,
        text=suffix.text,
        reward=suffix.reward,
        turns=turns,
        failure=suffix.failure,
        waited=rollout.waited + suffix.waited,
        transcript=suffix.transcript,
    )


def spans_before(spans: Sequence[Span], end: int) -> list[Span]:
    """The spans of the first `end` tokens."""
    cut, start = [], 0
    for span in spans:
        if start < end:
            cut.append(replace(span, tokens=min(span.tokens, end - start)))
        start += span.tokens
    return cut


def spliced_kv(rollout: Rollout, first: int, suffix: Rollout) -> KVUse:
    """KV use of the spliced answer: means over its sampled tokens, without those of the discarded suffix."""
    sparse, dense = rollout.kv, suffix.kv
    dense_prefix = len(rollout.prompt_ids) + (first + 1) / 2  # mean tokens that a dense policy holds over the prefix
    sampled = int(rollout.sampled[:first].sum())

    def mean(before: float, after: float) -> float:
        tokens = sampled + suffix.sampled_tokens
        return (min(before, dense_prefix) * sampled + after * suffix.sampled_tokens) / max(tokens, 1)

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

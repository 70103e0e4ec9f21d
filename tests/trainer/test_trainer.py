"""The trainer's step against plain loops, the modes that must not change it, and the parts that make it up."""

import json
import math
import os
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import toy
from alula import Engine, Evict, Select, Sparsity
from alula.distributed import World
from alula.engine.rollout import KVUse, Rollout, Sampling
from alula.errors import SettingError
from alula.files import size_text
from alula.mismatch.leaderboard.kv_bytes import row_state_bytes, summary_bytes
from alula.run.checkpoint import best_of
from alula.sparsity.footprint import most_held
from alula.sparsity.policy import DENSE
from alula.trainer.batch import RolloutBatch, assign_minibatches
from alula.trainer.build import check_shares
from alula.trainer.evaluation import EvalSummary
from alula.trainer.host_plan import host_rows, network_bytes, traffic_rows
from alula.trainer.memory_plan import plan_memory
from alula.trainer.reroll import spliced_kv
from alula.trainer.step_metrics import Clock, rollout_metrics
from two_ranks import fork_two_ranks

CALM = "learner.eps=1e-4"
"""Adam would turn a gradient that is zero but for rounding into a full step."""


def weights(run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.learner.full_parameters()}


def one_step(config, prepare=lambda run: None):
    """(weights before, the batch, the results of the update, weights after, the trainer)"""
    run = toy.trainer(config)
    prepare(run)
    before, kept = weights(run), []
    collect, update = run.collector.collect, run.updater.update
    run.collector.collect = lambda *arguments: kept.append(collect(*arguments)) or kept[-1]
    run.updater.update = lambda *arguments: kept.append(update(*arguments)) or kept[-1]
    run.train_step()
    return before, kept[0], kept[1], weights(run), run


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a, b, tolerance=1e-5) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=tolerance) for name in a)


# -- one step, by hand --------------------------------------------------------------------------------------


def plain_model(run, values) -> LlamaForCausalLM:
    config = type(run.loaded.model.config)(**run.loaded.model.config.to_dict())
    config._attn_implementation = "eager"
    config.pad_token_id = None  # a padding token's embedding would get no gradient
    model = LlamaForCausalLM(config)
    model.load_state_dict(values, strict=False)
    model.tie_weights()
    return model


def plain_logprobs(model, rollout, temperature):
    """One sequence, the whole vocabulary, nothing packed."""
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
    logits = model(ids).logits[0].float() / temperature
    start = len(rollout.prompt_ids)
    return torch.stack(
        [torch.log_softmax(logits[start + i - 1], -1)[token] for i, token in enumerate(rollout.token_ids)]
    )


@pytest.mark.parametrize("all_rollouts", [True, False], ids=["baseline of all", "baseline of the kept"])
@pytest.mark.parametrize("unit", ["groups", "rollouts"])
@pytest.mark.slow
def test_a_step_equals_plain_loops(tmp_path, unit, all_rollouts):
    """GRPO with ξ outside the clip, a veto, a KL and two optimizer steps, written out."""
    veto, beta, temperature = 0.9, 0.05, 1.3
    config = toy.quick(
        tmp_path / "run",
        CALM,
        f"objective.correction.veto={veto}",
        f"objective.kl={beta}",
        f"sampling.temperature={temperature}",
        "learner.weight_decay=0.1",
        f"learner.minibatch={unit}",
        "learner.token_budget=40",
        f"objective.correction.vetoed_in_baseline={all_rollouts}",
    )
    before, batch, learned, after, run = one_step(config)
    model = plain_model(run, before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.1)
    with torch.no_grad():
        old = [plain_logprobs(model, r, temperature) for r in batch.rollouts]  # and the reference: training begins
    ratios = [torch.exp(o - r.logprobs) for o, r in zip(old, batch.rollouts)]
    vetoed = [bool((ratio < veto).any()) for ratio in ratios]
    assert vetoed == learned.vetoed == learned.rejected
    assert 0 < sum(vetoed) < 16, "the seed vetoes nothing, or everything"

    advantages, mixed = [], 0
    for start in range(0, 16, 4):
        group = range(start, start + 4)
        baseline = [batch.rewards[i] for i in group if all_rollouts or not vetoed[i]]
        spread = statistics.stdev(baseline) if len(baseline) > 1 else 0.0
        mixed += spread > 0 and any(vetoed[i] for i in group)
        advantages += [
            (batch.rewards[i] - statistics.fmean(baseline)) / (spread + 1e-6) if spread else 0.0 for i in group
        ]
    assert mixed, "the seed has no group with a signal and a vetoed rollout"

    step = assign_minibatches(batch, 2, unit, 0, World()).tolist()
    for number in range(2):
        members = [i for i in range(16) if step[i] == number]
        loss = 0.0
        for i in members:
            now = plain_logprobs(model, batch.rollouts[i], temperature)
            for t in range(len(now)):
                rho = torch.exp(now[t] - old[i][t])
                objective = torch.minimum(rho * advantages[i], rho.clamp(0.8, 1.2) * advantages[i])
                if not vetoed[i]:
                    loss = loss - ratios[i][t] * objective / len(now) / len(members)
                distance = now[t] - old[i][t]
                loss = loss + beta * (torch.exp(-distance) - 1 + distance) / len(now) / len(members)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert learned.updates[number].loss == pytest.approx(loss.item(), abs=1e-6)
        assert learned.updates[number].grad_norm == pytest.approx(norm.item(), rel=1e-4)
        optimizer.step()
    parameters = dict(model.named_parameters())
    assert not close(before, after)
    assert close({name: parameters[name].detach() for name in after}, after)


# -- what must not change a step ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rkv", "block-topk"])
@pytest.mark.slow
def test_a_budget_that_no_answer_reaches_is_the_dense_run_bit_for_bit(tmp_path, method):
    roomy = (
        "sparsity={evict: {method: rkv, budget: 64, buffer: 8, window: 4, sinks: 1}}"
        if method == "rkv"
        else "sparsity={select: {method: block-topk, budget: 64, block: 4, dense_layers: 0}}"
    )
    longer = ("data.options={symbols: 4, prefix: 2, length: 6}", "sampling.max_new_tokens=8", "engine.page=4")
    toy.trainer(toy.quick(tmp_path / "dense", toy.DENSE, *longer)).run()
    toy.trainer(toy.quick(tmp_path / "sparse", roomy, *longer)).run()
    dense, sparse = toy.files(tmp_path / "dense"), toy.files(tmp_path / "sparse")
    assert dense["completions.jsonl"] == sparse["completions.jsonl"]
    for a, b in zip(dense["metrics.jsonl"], sparse["metrics.jsonl"]):
        same = {name for name in a if name in b}
        assert {name: a[name] for name in same} == {name: b[name] for name in same}
        assert {"policy/loss", "policy/grad_norm", "mismatch/kl_k3", "reward/mean"} <= same
    accuracies = [
        [row["accuracy"] for row in rows if row["policy"] == "dense"]
        for rows in (dense["evals.jsonl"], sparse["evals.jsonl"])
    ]
    assert accuracies[0] == accuracies[1]
    one, other = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("dense", "sparse"))
    assert one == other


@pytest.mark.slow
def test_a_sparse_budget_is_another_run(tmp_path):
    """Control for the test above: a sparse budget changes the run."""
    toy.trainer(toy.quick(tmp_path / "dense", toy.DENSE)).run()
    toy.trainer(toy.quick(tmp_path / "sparse")).run()
    assert toy.files(tmp_path / "dense")["metrics.jsonl"] != toy.files(tmp_path / "sparse")["metrics.jsonl"]


def test_without_a_difference_between_the_policies_every_correction_is_none(tmp_path):
    def sampled_is_dense(run):
        score = run.updater.score

        def scored(batch):
            score(batch)
            for rollout, dense in zip(batch.rollouts, batch.dense):
                rollout.logprobs = dense.clone()

        run.updater.score = scored

    presets = ("none", "sparse-rl", "tis", "mis", "icepop", "geometric", "prefix-only", "sparse-rl-code")
    after = {
        preset: one_step(toy.quick(tmp_path / preset, f"objective.correction={preset}"), sampled_is_dense)[3]
        for preset in presets
    }
    for preset in presets[1:]:
        assert equal(after[preset], after["none"]), preset


@pytest.mark.parametrize(("preset", "vetoed_indices"), [("strict", [3, 7]), ("sparse-rl", [7]), ("none", [7])])
def test_vetoes_are_counted_at_the_threshold_of_the_correction(tmp_path, preset, vetoed_indices):
    """ξ of one token is 5e-4 in rollout 3 and 5e-5 in rollout 7: strict rejects both, Sparse-RL's 1e-4 the second."""

    def veto_two(run):
        score = run.updater.score

        def scored(batch):
            score(batch)
            for i, (rollout, dense) in enumerate(zip(batch.rollouts, batch.dense)):
                rollout.logprobs = dense.clone()
                rollout.logprobs[0] -= math.log({3: 5e-4, 7: 5e-5}.get(i, 1.0))

        run.updater.score = scored

    settings = (f"objective.correction={preset}", "control={enabled: true, vetoed: 0.5}")
    *_, learned, _, run = one_step(toy.quick(tmp_path / "run", *settings), veto_two)
    assert [i for i, bad in enumerate(learned.vetoed) if bad] == vetoed_indices
    assert [i for i, bad in enumerate(learned.rejected) if bad] == ([] if preset == "none" else vetoed_indices)
    assert (run.monitor.controller.vetoed, run.monitor.controller.rollouts) == (len(vetoed_indices), 16)
    assert toy.rows(tmp_path / "run", "metrics.jsonl")[0]["mismatch/veto_rate"] == len(vetoed_indices) / 16


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("correction", ["sparse-rl", "none", "{preset: sparse-rl, inner: accepted, veto: 0.9}", "mis"])
def test_skipped_scoring_takes_the_same_steps(tmp_path, correction, updates):
    """To 1e-6 in float32, not to the bit: micro-batches of scoring and of training hold other rollouts."""
    settings = (CALM, f"learner.updates={updates}", f"objective.correction={correction}", "objective.kl=0")
    _, _, scored, two_passes, _ = one_step(toy.quick(tmp_path / "two", *settings))
    passes = []

    def watch(run):
        score = run.learner.score

        def watched(rollouts, *arguments, **options):
            passes.append(rollouts)
            return score(rollouts, *arguments, **options)

        run.learner.score = watched

    config = toy.quick(tmp_path / "one", *settings, "objective.skip_scoring=true")
    before, batch, learned, one_pass, run = one_step(config, watch)
    assert not close(before, one_pass)
    assert close(two_passes, one_pass, 1e-6)
    [left] = passes  # rollouts of later optimizer steps and, for the metrics, those that the first does not compute
    first = (run.updater.assign_minibatches(batch) == 0) & (learned.advantages != 0)
    assert 0 < first.sum() < 16
    assert left == [rollout for rollout, skipped in zip(batch.rollouts, first.tolist()) if not skipped]
    assert (learned.vetoed, learned.rejected) == (scored.vetoed, scored.rejected)
    assert learned.trained == scored.trained
    two, one = (
        {name: value for name, value in toy.rows(tmp_path / run, "metrics.jsonl")[0].items() if "mismatch/" in name}
        for run in ("two", "one")
    )
    assert len(two) > 12
    assert one == pytest.approx(two, abs=1e-5), "the mismatch is the whole step's in both modes"
    for mine, other in zip(learned.updates, scored.updates, strict=True):
        assert mine.loss == pytest.approx(other.loss, abs=1e-6)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def test_scoring_is_skipped_altogether_where_the_update_computes_everything(tmp_path):
    settings = ("learner.updates=1", "objective.kl=0", "objective.skip_scoring=true", "objective.skip_no_signal=false")
    scored = []

    def watch(run):
        score = run.learner.score
        run.learner.score = lambda rollouts, *rest: scored.extend(rollouts) or score(rollouts, *rest)

    one_step(toy.quick(tmp_path / "run", *settings), watch)
    assert scored == []
    assert toy.rows(tmp_path / "run", "metrics.jsonl")[0]["mismatch/kl_k3"] > 0


@pytest.mark.parametrize("updates", [1, 2])
def test_skipping_rollouts_without_gradient_changes_nothing(tmp_path, updates):
    settings = (CALM, "objective.kl=0", "objective.correction.veto=0.9", f"learner.updates={updates}")
    *_, learned, skipped, _ = one_step(toy.quick(tmp_path / "skip", *settings))
    *_, everyone, computed, _ = one_step(toy.quick(tmp_path / "all", *settings, "objective.skip_no_signal=false"))
    assert learned.trained == everyone.trained < 16
    scored = [sum(update.scored_tokens for update in one.updates) for one in (learned, everyone)]
    assert scored[0] < scored[1]
    assert close(skipped, computed, 1e-6)


def test_micro_batches_do_not_change_a_step(tmp_path):
    *_, large, _ = one_step(toy.quick(tmp_path / "large", CALM))
    *_, small, _ = one_step(toy.quick(tmp_path / "small", CALM, "learner.token_budget=13"))
    assert close(large, small, 1e-6)


WAITS = """
import time
from pathlib import Path

def until_scored(completion, example):
    end = time.monotonic() + 60
    while not Path("FOLDER/scored").exists():
        if time.monotonic() > end:
            raise TimeoutError("graded before scoring")
        time.sleep(0.01)
    return len(completion) % 3
"""


@pytest.mark.parametrize("kl", [0.3, 0.0])
def test_answers_are_graded_while_they_are_scored(tmp_path, monkeypatch, kl):
    """The reward waits until the learner has scored the rollouts: it would fail if grading came first."""
    (tmp_path / "waiting_rewards.py").write_text(WAITS.replace("FOLDER", str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards = "rewards={use: ['waiting_rewards:until_scored'], timeout: 120, workers: 1}"
    config = toy.quick(tmp_path / "run", rewards, f"objective.kl={kl}")

    def note_scoring(run):
        score = run.learner.score

        def scored(*arguments, **options):
            result = score(*arguments, **options)
            (tmp_path / "scored").touch()
            return result

        run.learner.score = scored

    _, batch, result, _, run = one_step(config, note_scoring)
    run.rewards.close()
    assert batch.rewards == [len(rollout.answer()) % 3 for rollout in batch.rollouts]
    assert not any(batch.failures)
    assert result.updates


def test_truncated_answers_can_be_masked(tmp_path):
    """An end token may come first, so some answers stop and others are cut off."""
    settings = ("sampling.prompts=8", "objective.kl=0", "sampling.max_new_tokens=3", toy.DENSE)
    _, batch, learned, _, _ = one_step(toy.quick(tmp_path / "run", *settings, "objective.mask_truncated=true"))
    finishes = [rollout.finish for rollout in batch.rollouts]
    assert {"stop", "length"} == set(finishes)
    assert all(a == 0 for a, finish in zip(learned.advantages.tolist(), finishes) if finish == "length")
    _, _, unmasked, _, _ = one_step(toy.quick(tmp_path / "other", *settings))
    stopped = torch.tensor([finish == "stop" for finish in finishes])
    assert torch.equal(unmasked.advantages[stopped], learned.advantages[stopped]), "the baseline counts all rollouts"
    assert unmasked.trained > learned.trained


# -- reroll and dynamic sampling ----------------------------------------------------------------------------


def test_reroll_regenerates_densely_from_the_first_vetoed_token(tmp_path):
    longer = ("data.options={symbols: 4, prefix: 2, length: 6}", "sampling.max_new_tokens=8", "sampling.prompts=8")
    settings = ("objective.correction={preset: reroll, veto: 0.8}", "objective.kl=0", *longer)
    sampled = []

    def remember(run):
        collect = run.rollouts.collect

        def remembered(*arguments, **options):
            rollouts = collect(*arguments, **options)
            if not sampled:  # what follows are the continuations
                sampled.extend(rollouts)
            return list(rollouts)

        run.rollouts.collect = remembered

    _, batch, learned, _, run = one_step(toy.quick(tmp_path / "run", *settings), remember)
    assert 0 < sum(batch.rerolled) < len(batch.rollouts)
    rescored = toy.trainer(toy.quick(tmp_path / "fresh", *settings)).learner.score(sampled)
    generated = sum(map(len, sampled))
    for before, now, rerolled, dense, rest in zip(sampled, batch.rollouts, batch.rerolled, rescored, batch.dense):
        ratio = torch.exp(dense - before.logprobs)
        low = (ratio < 0.8).nonzero().flatten().tolist()
        assert rerolled == bool(low)
        if not rerolled:
            assert now is before
            continue
        first = low[0]
        generated += len(now) - first
        assert now.token_ids[:first] == before.token_ids[:first]
        assert torch.equal(now.logprobs[:first], before.logprobs[:first]), "the prefix stays sparse"
        assert len(now.logprobs) == len(now.token_ids) <= 8
        assert now.finish in ("stop", "length")
        assert now.text == run.loaded.tokenizer.decode(now.token_ids, skip_special_tokens=True)
        assert torch.allclose(now.logprobs[first:], rest[first:], atol=1e-4), "the new part is the dense policy's own"
    assert not any(learned.rejected), "nothing is left to veto"
    assert learned.vetoed == batch.rerolled
    completions = toy.rows(tmp_path / "run", "completions.jsonl")
    assert [one["vetoed"] for one in completions] == [batch.rerolled[4 * i + i % 4] for i in range(4)] != [False] * 4
    row = toy.rows(tmp_path / "run", "metrics.jsonl")[0]
    assert row["mismatch/rerolled"] == sum(batch.rerolled) / len(batch.rollouts)
    assert row["mismatch/veto_rate"] == row["mismatch/rerolled"], "reported as sampled"
    assert row["mismatch/rejected"] == 0
    assert row["speed/tokens_per_s"] * row["time/rollout"] == pytest.approx(generated), "replaced rollouts count too"
    rewards = run.rewards.score([r.text for r in batch.rollouts], [e.record() for e in batch.examples])
    assert batch.rewards == rewards.total, "rewarded after it was repaired"


def test_dynamic_sampling_draws_until_groups_have_a_signal(tmp_path):
    sparse_signal = ("sampling.prompts=4", "sampling.n=2", "rewards.use=['task:successor']")
    config = toy.quick(tmp_path / "run", *sparse_signal, "sampling.dynamic=true", "sampling.max_rounds=100")
    _, batch, _, _, run = one_step(config)
    groups = [batch.rewards[i : i + 2] for i in range(0, 8, 2)]
    assert all(a != b for a, b in groups)
    assert batch.drawn_groups > 4
    assert batch.drawn_groups % 4 == 0
    assert run.stream.seen == batch.drawn_groups, "the stream advanced by the drawn groups"
    row = toy.rows(tmp_path / "run", "metrics.jsonl")[0]
    assert row["groups/no_signal"] == pytest.approx(batch.no_signal_groups / batch.drawn_groups)
    assert row["groups/drawn"] == batch.drawn_groups


def test_the_kv_of_a_reroll_is_that_of_its_two_parts():
    """Over a short prefix the KV held is at most that of the dense policy, for any length of the sparse rollout."""
    sparse = KVUse(
        peak_tokens=40,
        mean_tokens=20.0,
        dense_mean_tokens=30.0,
        mean_read_tokens=4.0,
        peak_pages=10,
        peak_bytes=400,
        mean_bytes=200.0,
        evictions=3,
        pages_freed=5,
        swaps=1,
    )
    dense = KVUse(
        peak_tokens=12,
        mean_tokens=9.0,
        dense_mean_tokens=9.0,
        mean_read_tokens=9.0,
        peak_pages=3,
        peak_bytes=120,
        mean_bytes=90.0,
        swaps=2,
    )
    rollout = Rollout([1] * 4, [2] * 50, torch.zeros(50), "stop", kv=sparse)
    suffix = Rollout([1] * 6, [3] * 6, torch.zeros(6), "stop", kv=dense)
    prefix = 4 + 1.5  # the prompt, and one or two tokens
    assert spliced_kv(rollout, 2, suffix) == KVUse(
        peak_tokens=40,
        mean_tokens=(2 * prefix + 6 * 9) / 8,
        dense_mean_tokens=(2 * prefix + 6 * 9) / 8,
        mean_read_tokens=(2 * 4 + 6 * 9) / 8,
        peak_pages=10,
        peak_bytes=400,
        mean_bytes=10 * (2 * prefix + 6 * 9) / 8,
        evictions=3,
        pages_freed=5,
        swaps=3,
    )


def test_dynamic_sampling_counts_failures_of_what_it_chose_and_tokens_of_what_it_drew(tmp_path, monkeypatch):
    """Answers that begin with `a` or `b` cannot be graded, by either of two rewards."""
    (tmp_path / "picky.py").write_text(
        "def one(completion, example):\n    return {'c': 0.0, 'd': 1.0}[completion[:1]]\n\n\ntwo = one\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = ("sampling.prompts=4", "sampling.n=2", "rewards={use: ['picky:one', 'picky:two'], workers: 1}")
    lengths = []

    def count(run):
        collect = run.rollouts.collect

        def counted(*arguments):
            rollouts = collect(*arguments)
            lengths.extend(map(len, rollouts))
            return rollouts

        run.rollouts.collect = counted

    config = toy.quick(tmp_path / "run", *settings, "sampling.dynamic=true", "sampling.max_rounds=30", "eval.every=0")
    _, batch, _, _, _ = one_step(config, count)
    assert len(lengths) > len(batch.rollouts) == 8, "some were drawn and not chosen"
    failed = [(rollout.text or "")[:1] not in ("c", "d") for rollout in batch.rollouts]
    assert 0 < sum(failed) < 8
    assert [len(why) for why in batch.failures] == [2 * bad for bad in failed]
    [row] = toy.rows(tmp_path / "run", "metrics.jsonl")
    assert row["reward/failed"] == sum(failed) / 8
    assert row["speed/tokens_per_s"] * row["time/rollout"] == pytest.approx(sum(lengths))
    [event] = [one for one in toy.rows(tmp_path / "run", "events.jsonl") if one["kind"] == "not-graded"]
    assert event["message"].startswith(f"{sum(failed)} answers of step 1 could not be graded")


def test_dynamic_sampling_has_a_cap(tmp_path):
    never = ("sampling.prompts=4", "sampling.n=2", "sampling.max_new_tokens=1", "rewards.use=['task:successor']")
    config = toy.quick(tmp_path / "run", *never, "sampling.dynamic=true", "sampling.max_rounds=3")
    _, batch, _, _, _ = one_step(config)
    assert batch.drawn_groups == 12
    assert len(batch.rollouts) == 8


def test_reroll_and_dynamic_sampling_report_the_mismatch_of_every_round(tmp_path):
    """The metrics cover the sampled rollouts of the chosen groups from every round."""
    sparse_signal = ("sampling.prompts=4", "sampling.n=2", "rewards.use=['task:successor']", "sampling.dynamic=true")
    rerolled = ("objective.correction={preset: reroll, veto: 0.9}", "sampling.max_rounds=30")
    _, batch, _, _, _ = one_step(toy.quick(tmp_path / "run", *sparse_signal, *rerolled))
    assert batch.drawn_groups > 4
    assert 0 < sum(batch.rerolled) < 8
    row = toy.rows(tmp_path / "run", "metrics.jsonl")[0]
    assert row["mismatch/veto_rate"] == row["mismatch/rerolled"] == sum(batch.rerolled) / 8
    log_xi = [value for one in batch.log_ratios_before_reroll for value in one.tolist()]
    assert row["mismatch/kl_k1"] == pytest.approx(-statistics.fmean(log_xi), abs=1e-7)


# -- parts --------------------------------------------------------------------------------------------------


def rollout_batch(prompts: range, n: int) -> RolloutBatch:
    rollouts = [
        Rollout([1], [2], torch.zeros(1), "stop", prompt_index=prompt, sample_index=sample)
        for prompt in prompts
        for sample in range(n)
    ]
    return RolloutBatch(rollouts, [], n)


@pytest.mark.parametrize(("groups", "n", "updates"), [(8, 4, 4), (7, 3, 2), (5, 2, 5), (3, 4, 1)])
@pytest.mark.parametrize("unit", ["groups", "rollouts"])
def test_minibatches_share_out_everything_evenly(groups, n, updates, unit):
    step = assign_minibatches(rollout_batch(range(40, 40 + groups), n), updates, unit, 0, World())
    sizes = torch.bincount(step, minlength=updates)
    assert int(sizes.sum()) == groups * n
    assert int(sizes.max() - sizes.min()) <= (n if unit == "groups" else 1)
    if unit == "groups":
        assert torch.equal(step.view(groups, n), step.view(groups, n)[:, :1].expand(-1, n))
    again = assign_minibatches(rollout_batch(range(40, 40 + groups), n), updates, unit, 0, World())
    assert torch.equal(step, again)
    if unit == "rollouts" and updates > 1 and groups > 5:
        other = assign_minibatches(rollout_batch(range(80, 80 + groups), n), updates, unit, 0, World())
        assert not torch.equal(step, other), "each prompt has a shuffle of its own"


class Rank(World):
    """One of two ranks, whose collective sees what the other would send."""

    def all_gather(self, value):
        return [value if rank == self.rank else [*range(40, 48)][rank::2] for rank in range(2)]


@pytest.mark.parametrize("unit", ["groups", "rollouts"])
def test_minibatches_are_those_of_one_rank(unit):
    whole = assign_minibatches(rollout_batch(range(40, 48), 4), 3, unit, 0, World()).view(8, 4)
    for rank in range(2):
        share = assign_minibatches(rollout_batch(range(40, 48)[rank::2], 4), 3, unit, 0, Rank(rank, 2)).view(4, 4)
        assert torch.equal(share, whole[rank::2])


def test_a_clock_counts_nested_phases_once(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock(torch.device("cpu"))  # 0
    with clock.phase("outer"):  # 1
        with clock.phase("inner"):  # 2 .. 3
            pass
        with clock.phase("inner"):  # 4 .. 5
            pass
    assert clock.seconds == {"outer": 3, "inner": 2}  # 1-2, 3-4, 5-6 and 2-3, 4-5
    assert clock.total == 7


def test_the_plan_adds_up(tmp_path):
    """qwen2.5-1.5b: 28 layers, 2 KV heads of 128; 1,543,714,304 parameters with a tied head."""
    plan = plan_memory(
        toy.toy(
            tmp_path,
            "model={source: 'shape:qwen2.5-1.5b', dtype: bfloat16}",
            "sampling.prompts=128",
            "sampling.max_new_tokens=4096",
            "data.max_prompt_tokens=512",
            "engine.max_rows=1024",
            "objective.kl=1e-4",
            "sparsity.evict={method: rkv, budget: 512}",
            "learner.updates=4",
            "learner.logprob_chunk=2048",
        )
    )
    parameters = 1_543_714_304
    assert plan.parameters == parameters
    assert (plan.weights, plan.masters, plan.moments) == (2 * parameters, 4 * parameters, 8 * parameters)
    assert (plan.engine_copy, plan.reference) == (0, 2 * parameters)
    assert plan.geometry.kv_token_bytes == 2 * 28 * 2 * 128 * 2
    assert plan.kv_dense == 1024 * (512 + 4096) * plan.geometry.kv_token_bytes
    assert plan.kv_sparse == 1024 * (512 + 128) * plan.geometry.kv_token_bytes
    assert (plan.rollouts, plan.most_tokens) == (1024, 1024 * 4096)
    assert plan.logits == 2 * 4 * 2048 * 151936
    assert plan.activations == plan.all_activations * plan.longest, "the toy keeps all of them"
    assert plan_memory(toy.toy(tmp_path, "learner.activation_checkpointing=true")).activations == 3 * 64 * 4 * 4096


def test_the_plan_of_several_nodes_and_of_workers(tmp_path):
    """Two nodes of eight ranks: the learner's state in eighths, or in sixteenths with `shard=all`."""
    settings = ("model={source: 'shape:qwen2.5-1.5b', dtype: bfloat16}", "sampling.prompts=128", "objective.kl=1e-4")
    config = toy.toy(tmp_path, *settings, "learner.updates=2", "sampling.n=8", "learner.token_budget=16384")
    every = toy.toy(tmp_path, *settings, "learner.shard=all")
    parameters = 1_543_714_304
    one, two = plan_memory(config, 8), plan_memory(config, 16, nodes=2)
    for plan in (one, two):
        assert (plan.shards, plan.weights, plan.moments) == (8, 4 * parameters // 8, 8 * parameters // 8)
        assert plan.published == plan.engine_copy == 2 * parameters
    assert plan_memory(every, 16, nodes=2).moments == 8 * parameters // 16
    assert (one.running, two.running) == (128, 64)
    assert plan_memory(config).published == 0
    assert network_bytes(config, two) == 4 * parameters, "gradients once there and once back, a half each"
    assert dict(traffic_rows(config, one)) == {"weights to the engines": "2.88 GiB to each of 8"}
    assert dict(traffic_rows(config, two))["learner between 2 nodes, per node"] == size_text(8 * parameters)
    assert dict(host_rows(config, two))["checkpoint, while it is written"] == size_text(6 * parameters)

    apart = plan_memory(config, 8, workers=4)
    assert (apart.engine_copy, apart.worker_weights, apart.running) == (0, 2 * parameters, 256)
    assert apart.learning == one.learning - one.engine_copy
    assert apart.generating(None) == 2 * parameters + apart.kv_sparse + apart.row_state
    lora = plan_memory(toy.toy(tmp_path, *settings, "learner.lora.rank=8"), 8, workers=4)
    assert (lora.published, lora.worker_weights) == (2 * lora.trained, 4 * parameters)


@pytest.mark.parametrize(("protect", "held"), [("false", 10), ("true", 15)])
def test_the_plan_counts_a_protected_prompt(tmp_path, protect, held):
    evict = f"{{method: rkv, budget: 8, buffer: 2, window: 2, sinks: 1, protect_prompt: {protect}}}"
    plan = plan_memory(
        toy.quick(tmp_path, f"sparsity.evict={evict}", "sampling.max_new_tokens=20", "data.max_prompt_tokens=5")
    )
    assert plan.kv_sparse == plan.running * held * plan.geometry.kv_token_bytes


@pytest.mark.parametrize("method", ["rkv", "h2o", "streaming"])
@pytest.mark.parametrize("selector", ["quest", "block-topk"])
def test_the_plan_counts_what_policies_hold_beside_kv(method, selector):
    """Against the buffers of an engine that ran them."""
    policy = Sparsity(Evict(method, 20, buffer=4, window=4, sinks=1), Select(selector, 12, 4, 0))
    engine = Engine.load("shape:tiny-qwen3", page=4, kv_memory="1MiB", max_rows=3)
    engine.generate([[3, 4, 5]], Sampling(max_new_tokens=40, ignore_eos=True), policy)
    [state] = engine.runner.batches.values()
    held = sum(buffer.nbytes for buffer in (state.ring, state.accumulated) if buffer is not None)
    assert held == 3 * row_state_bytes(engine.geometry, policy.evict, most_held(policy.evict, 3, 43))
    cache = engine.runner.cache
    kv = cache.keys.nbytes + cache.values.nbytes
    share = summary_bytes(engine.geometry, policy.select) / (4 * engine.geometry.kv_token_bytes)
    assert cache.summaries[selector].nbytes == pytest.approx(kv * share)


def test_the_plan_counts_what_distillation_holds(tmp_path):
    without, distilled = (toy.quick(tmp_path / "run", *more) for more in ((), ("distill.rank=4",)))
    assert (plan_memory(without).sparse_copy, plan_memory(without).adapter) == (0, 0)
    run = toy.trainer(distilled)
    dense = {p.data_ptr() for p in run.rollouts.engine.model.parameters()}
    copies = [p for p in run.rollouts.engine.sparse_model.parameters() if p.data_ptr() not in dense]
    assert plan_memory(distilled).sparse_copy == sum(p.numel() * p.itemsize for p in copies) > 0
    adapter = run.distill.distiller.adapter()
    numbers = sum(a.numel() + b.numel() for a, b in adapter.weights.values())
    assert plan_memory(distilled).adapter == 4 * 4 * numbers, "float32: itself, two moments, a gradient"
    half = toy.quick(tmp_path / "half", "distill.rank=4", "model.dtype=bfloat16")
    assert plan_memory(half).adapter == (2 + 4 * 4) * numbers, "and a master"
    adapter.save(tmp_path / "adapter")
    given = toy.quick(tmp_path / "given", f"distill.adapter={tmp_path / 'adapter'}")
    assert plan_memory(given).adapter == plan_memory(distilled).adapter, "at the adapter's rank"


# -- runs --------------------------------------------------------------------------------------------------


def test_a_preset_of_another_model_is_reported_once(tmp_path):
    out, events = tmp_path / "run", []
    preset = "sparsity={select: {method: block-topk, budget: qwen3-4b-0.86}}"
    for steps, resume in ((2, False), (4, True)):
        run = toy.trainer(toy.quick(out, preset, f"steps={steps}"), resume)
        assert bool(re.search("other-model: .*'qwen3-4b-0.86' .* Qwen/Qwen3-4B", toy.printed(run))) is not resume
        run.run()
        events = [row for row in toy.rows(out, "events.jsonl") if row["kind"] == "other-model"]
        assert [row["step"] for row in events] == [0]
    assert "alula calibrate --verify" in events[0]["advice"]


def test_a_run_leaves_a_complete_folder(tmp_path):
    out = tmp_path / "run"
    run = toy.trainer(toy.quick(out, "logging.completions=3"))
    assert run.run()
    assert json.loads((out / "status.json").read_text()) == {"state": "finished", "total_steps": 4}
    rows = toy.rows(out, "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    tokens = [row["speed/tokens_per_s"] * row["time/rollout"] for row in rows]
    assert tokens == pytest.approx([16 * row["response/length_mean"] for row in rows])
    glossary = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    names = {name.partition("/tail/")[0].partition("schedule/budget/")[0] for row in rows for name in row}
    assert [name for name in sorted(names - {"", "step"}) if f"`{name}`" not in glossary] == []
    assert {(row["step"], row["policy"]) for row in toy.rows(out, "evals.jsonl")} == {
        (step, policy) for step in (0, 2, 4) for policy in ("dense", "sparse")
    }
    completions = toy.rows(out, "completions.jsonl")
    assert len(completions) == 12
    assert set(completions[0]) == {"step", "prompt", "completion", "reward", "finish", "vetoed"}
    assert len({row["prompt"] for row in completions if row["step"] == 1}) > 1

    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    prompt = tokenizer("a c :")["input_ids"]
    ours = run.rollouts.engine.generate([prompt], Sampling(temperature=0, max_new_tokens=6), DENSE)[0].token_ids
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :].tolist()
    assert ours == theirs


def test_rollouts_show_their_progress(tmp_path):
    run, seen = toy.trainer(toy.quick(tmp_path / "run", "eval.every=0")), []
    run.collector.show_progress = lambda *numbers: seen.append(numbers)
    run.train_step()
    assert [(done, of) for done, of, _, _ in seen] == [(done, 16) for done in range(1, 17)]
    assert seen[0][3] == 16 * 2, "first of all, the longest answers"
    tokens = seen[-1][2]
    assert tokens == sum(row["response/length_mean"] * 16 for row in toy.rows(tmp_path / "run", "metrics.jsonl"))
    run.train_step()
    assert seen[16][3] == tokens, "then as many tokens as in the last step"


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_all_files_of_a_run_heed_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        toy.trainer(toy.quick(tmp_path / "run", "distill={rank: 2}", "steps=2")).run()
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"model.safetensors", "tensors.safetensors", "metrics.jsonl"} <= {path.name for path in files}
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: 0o666 & ~mask for path in files}


def test_a_resumed_run_keeps_its_threads(tmp_path, monkeypatch):
    """The number of threads changes the order of float sums."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    out, before = tmp_path / "run", torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        toy.trainer(toy.quick(out)).run()
        assert torch.get_num_threads() == 1, "a small model uses one"
        record = out / "environment.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"threads": 2}))
        toy.trainer(toy.quick(out, "steps=5"), resume=True).logger.writer.close()
        assert torch.get_num_threads() == json.loads(record.read_text())["threads"] == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        toy.trainer(toy.quick(out, "steps=6"), resume=True)
        assert torch.get_num_threads() == json.loads(record.read_text())["threads"] == 1
    finally:
        torch.set_num_threads(before)


def test_a_run_that_cannot_be_sparse_warns_at_its_start(tmp_path):
    run = toy.trainer(toy.quick(tmp_path / "run", "sparsity=snapkv:30+8,window=1,sinks=1"))
    assert "never-sparse: Nothing will be sparse: no sequence exceeds the budget (snapkv:30+8" in toy.printed(run)
    assert "never-sparse" not in toy.printed(toy.trainer(toy.quick(tmp_path / "sparse")))


def test_a_rejected_resume_leaves_the_run_as_it_was(tmp_path):
    out = tmp_path / "run"
    assert toy.trainer(toy.quick(out)).run()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5}\n')  # a step after the checkpoint, lost with a kill
    names = ("config.yaml", "metrics.jsonl", "evals.jsonl", "status.json")
    before = [(out / name).read_text() for name in names]
    assert json.loads((out / "environment.json").read_text())["threads"] == torch.get_num_threads()
    with pytest.raises(SettingError, match=r"steps=2: .* 4 "):
        toy.trainer(toy.quick(out, "steps=2"), resume=True)
    for setting, name in (
        ("distill={rank: 4}", r"distill\.rank"),
        ("learner.lora={rank: 2}", r"learner\.lora\.rank"),
        ("data.options={symbols: 5, prefix: 2, length: 2}", r"data\.options\.symbols"),  # the task's tokenizer
    ):
        with pytest.raises(SettingError, match=rf"{name}.*: changed since the run began.*step-00000004 does not fit"):
            toy.trainer(toy.quick(out, setting), resume=True)
    assert [(out / name).read_text() for name in names] == before


def test_an_impossible_folder_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"out=.*/file: "):
        toy.trainer(toy.quick(tmp_path / "file"))
    with pytest.raises(SettingError, match=r"out=.*/file/run: "):
        toy.trainer(toy.quick(tmp_path / "file" / "run"))


def test_unknown_evictor_raises_before_anything_is_created(tmp_path):
    with pytest.raises(SettingError, match=r"sparsity\.evict: .*'rvk'"):
        toy.trainer(toy.quick(tmp_path / "run", "sparsity.evict.method=rvk"))
    assert not (tmp_path / "run").exists()


def test_an_absent_device_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingError, match=r"^model\.device=cuda: .* 0 CUDA"):
        toy.trainer(toy.quick(tmp_path / "run", "model.device=cuda"))


@pytest.mark.parametrize(("best", "kept"), [("true", [1, 5]), ("false", [5])])
def test_best_checkpoint_is_kept_if_set(tmp_path, monkeypatch, best, kept):
    accuracies = iter([0.1, 0.9, 0.3, 0.2, 0.4, 0.5])
    monkeypatch.setattr(
        "alula.trainer.evaluation.evaluate_policy", lambda *a: EvalSummary(next(accuracies), 0.01, 8, 2.0, 0.0)
    )
    out = tmp_path / "run"
    run = toy.trainer(
        toy.quick(
            out,
            "steps=5",
            "eval.every=1",
            "eval.sparse=false",
            "checkpoint.every=2",
            "checkpoint.keep=1",
            f"checkpoint.best={best}",
        )
    )
    save, saved = run.save, []
    monkeypatch.setattr(run, "save", lambda: (saved.append(run.step), save()))
    run.run()
    best_path = best_of(run.checkpoints.all())
    assert (best_path and best_path.name) == ("step-00000001" if best == "true" else None), (
        "saved although none was due"
    )
    assert saved == sorted({2, 4, *kept})
    assert [path.name for path in run.checkpoints.all()] == [f"step-{step:08}" for step in kept]


def test_with_adapters_the_engine_follows_the_learner(tmp_path):
    """LoRA: the engine has its own weights, the reference is the policy without adapters."""
    config = toy.quick(tmp_path / "run", "learner.lora={rank: 4, alpha: 8}", "objective.kl=0.1", toy.DENSE)
    before, batch, _, after, run = one_step(config)
    assert not close(before, after)
    assert run.learner.reference is None
    theirs = run.rollouts.engine.score(batch.rollouts)
    ours = run.learner.score(batch.rollouts)
    for a, b, reference, old in zip(theirs, ours, batch.reference, batch.dense):
        assert torch.allclose(a.logprobs, b, atol=1e-4)
        assert not torch.allclose(a.logprobs, old, atol=1e-4)
        assert torch.allclose(reference, old, atol=1e-5), "at the first step the two are the same"
    run.train_step()
    assert toy.rows(tmp_path / "run", "metrics.jsonl")[1]["policy/kl_ref"] > 0


@pytest.mark.parametrize("loss", ["dr_grpo", "dapo", "cispo", "gspo"])
def test_every_loss_trains(tmp_path, loss):
    correction = "geometric" if loss == "gspo" else "tis"
    settings = (f"objective.loss={loss}", f"objective.correction={correction}", "objective.advantage=rloo")
    before, _, learned, after, _ = one_step(toy.quick(tmp_path / "run", *settings, "objective.kl=0", toy.DENSE))
    assert all(update.taken for update in learned.updates)
    assert not close(before, after)


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        (5, (), "sampling.prompts=4: .* 5 ranks"),
        (3, (), r"learner.updates=2: must be at most 1 \(the groups .* 3 ranks\)"),
        (2, (), None),
        (3, ("learner.minibatch=rollouts",), None),
    ],
)
def test_every_rank_has_a_part_of_every_update(tmp_path, size, overrides, message):
    config = toy.quick(tmp_path, *overrides)
    if message is None:
        check_shares(config, World(size=size))
    else:
        with pytest.raises(SettingError, match=message):
            check_shares(config, World(size=size))


def test_a_stop_during_an_evaluation_keeps_the_best_checkpoint(tmp_path, monkeypatch):
    """It is saved without a score, and gets it when the evaluation is repeated."""
    accuracy, stop = {0: 0.1, 2: 0.9, 4: 0.5, 6: 0.4}, [2]
    settings = ("steps=6", "eval.every=2", "eval.sparse=false", "checkpoint.every=2", "checkpoint.keep=1")

    def evaluated(config, collector, *rest):
        if run.step in stop:
            stop.clear()
            run.stop.requested = True
        return EvalSummary(accuracy[run.step], 0.01, 8, 2.0, 0.0)

    monkeypatch.setattr("alula.trainer.evaluation.evaluate_policy", evaluated)
    run = toy.trainer(toy.quick(tmp_path, *settings))
    assert not run.run()
    run = toy.trainer(toy.quick(tmp_path, *settings), resume=True)
    assert run.run()
    assert [path.name for path in run.checkpoints.all()] == ["step-00000002", "step-00000006"]
    assert best_of(run.checkpoints.all()).name == "step-00000002"
    assert not run.checkpoints._faults(best_of(run.checkpoints.all()))


def test_a_rank_without_groups_scores_nothing_that_reroll_has_scored(tmp_path, monkeypatch):
    """Scoring is collective: the other ranks, which have rollouts, do not call it either."""
    run = toy.trainer(toy.quick(tmp_path, "objective.correction={preset: reroll, veto: 0.9}", "objective.kl=0"))
    monkeypatch.setattr(run.learner, "score", lambda *a, **k: pytest.fail("scored"))
    batch = RolloutBatch([], [], 2, drawn_groups=1)
    run.updater.score(batch)
    batch.reward_parts = {"task:successor": []}
    other = {"count": 4, "mismatch/rerolled": 3}
    two_ranks = SimpleNamespace(all_gather=lambda sums: [dict.fromkeys(sums, 1.0) | other, sums])
    assert rollout_metrics(run.config, batch, two_ranks, 0)["mismatch/rerolled"] == 0.75


WORKER = """
import sys
import toy
from alula.trainer.trainer import train
from pathlib import Path

settings = ("objective.correction={preset: reroll, veto: 0.9}", "sampling.dynamic=true", "sampling.max_rounds=2",
            "learner.updates=2", "checkpoint.best=false")
with open("/dev/null", "w") as silent:
    for name, more, resume in (
        ("uninterrupted", (), False), ("resumed", ("steps=2",), False), ("resumed", (), True)
    ):
        assert train(toy.quick(Path(sys.argv[1]) / name, *settings, *more), resume=resume, stream=silent)
"""


@pytest.mark.slow
def test_two_ranks_train_and_resume(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    fork_two_ranks(script, tmp_path)
    uninterrupted, resumed = (toy.files(tmp_path / name) for name in ("uninterrupted", "resumed"))
    assert uninterrupted == resumed
    rows = uninterrupted["metrics.jsonl"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["policy/skipped"] == 0 for row in rows)
    assert {row["n"] for row in uninterrupted["evals.jsonl"]} == {8}, "both shares are counted"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "uninterrupted" / "model")
    assert model.config.vocab_size == 9

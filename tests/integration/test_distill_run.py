"""Training runs with distillation: the adapter, moving to a sparser policy, resuming, two ranks."""

import io
import json
import re
from dataclasses import replace

import pytest
import torch

from alula.config.load import read_tree
from alula.data import PromptStream
from alula.errors import SettingError
from alula.models.lora import Adapter
from alula.trainer.trainer import Trainer
from distill_runs import FIRST, RECIPE, distilling_run, trained, watched
from toy import veto_everything, without_clocks
from two_ranks import fork_two_ranks


def test_run_distils_moves_to_the_sparser_policy_and_resumes(tmp_path):
    uninterrupted = trained(tmp_path / "uninterrupted")
    assert [("distill/kl" in row, "distill/candidate_tail" in row) for row in uninterrupted] == [
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    ]
    assert [row["schedule/budget/0"] for row in uninterrupted] == [10, 10, 8, 8], "sparser after the second step"
    assert uninterrupted[1]["distill/tokens"] <= 3 * 4 * 8
    adapter = Adapter.load(tmp_path / "uninterrupted" / "sparse_adapter")
    assert any(b.abs().max() > 0 for _, b in adapter.weights.values())
    events = [json.loads(line) for line in (tmp_path / "uninterrupted" / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "sparser" and "moves to it" in event["message"] for event in events)

    clocks = [json.loads(line) for line in (tmp_path / "uninterrupted" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["speed/distill_cost"] > 0 for row in clocks)
    assert ["speed/sparser" in row for row in clocks] == [False, False, True, True]
    seconds = [row["time/rollout"] for row in clocks]
    tokens = [row["speed/tokens_per_s"] * spent for row, spent in zip(clocks, seconds)]
    before = sum(tokens[:2]) / sum(seconds[:2])
    assert clocks[3]["speed/sparser"] == pytest.approx(clocks[3]["speed/tokens_per_s"] / before)

    trained(tmp_path / "killed", stop_after=3)
    assert trained(tmp_path / "killed", resume=True) == uninterrupted
    again = Adapter.load(tmp_path / "killed" / "sparse_adapter")
    assert all(torch.equal(b, again.weights[name][1]) for name, (_, b) in adapter.weights.items())


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}], ids=["shared weights", "lora"])
def test_vetoed_rollouts_are_distilled_and_the_engine_serves_the_adapter(tmp_path, monkeypatch, lora):
    """All rollouts are vetoed: they do not train θ, but they train φ."""
    veto_everything(monkeypatch)
    trainer, seen = watched(
        tmp_path,
        steps=3,
        eval={"every": 0},
        learner=RECIPE["learner"] | {"lora": lora},
        objective={"loss": "dr_grpo", "clip_high": 0.28, "kl": 0.1, "correction": "sparse-rl"},
        distill=RECIPE["distill"] | {"move": None, "every": 1, "fraction": 1.0},
    )
    experiences, update = [], trainer.updater.update
    trainer.updater.update = lambda batch, *rest: experiences.append(batch) or update(batch, *rest)
    trainer.run()
    assert len(seen) == 3
    assert trainer.distill.distiller.loss == replace(trainer.config.objective, kl=0.0)
    assert (trainer.config.objective.clip_high, trainer.config.objective.kl) == (0.28, 0.1)
    for call, batch in zip(seen, experiences):
        assert call.rollouts == batch.rollouts
        rewards = torch.tensor(batch.rewards).view(-1, 4)
        above = (rewards - rewards.mean(1, keepdim=True)).flatten()
        torch.testing.assert_close(call.advantages.cpu().sign(), above.sign())
    assert any(call.advantages.abs().max() > 0 for call in seen)
    adapter = trainer.distill.distiller.adapter()
    plain, sparse = (
        dict(m.named_parameters()) for m in (trainer.rollouts.engine.model, trainer.rollouts.engine.sparse_model)
    )
    moved = 0
    for name, (a, b) in adapter.weights.items():
        update = adapter.scale * b @ a
        moved += update.abs().max() > 1e-4
        torch.testing.assert_close(sparse[f"{name}.weight"], plain[f"{name}.weight"] + update, rtol=1e-4, atol=1e-5)
    assert moved > 0
    assert adapter.base_model == "shape:tiny-llama"


def test_evictions_of_distilled_rollouts_are_written(tmp_path):
    trained(
        tmp_path / "run",
        steps=2,
        eval={"every": 0},
        logging={"rollouts": 1},
        distill=RECIPE["distill"] | {"move": None, "every": 2, "fraction": 1.0},
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2], "the second step distils"
    for row in rows:
        assert all(set(rollout["evicted"]) > {"0"} for rollout in row["rollouts"])


def test_teacher_follows_theta(tmp_path):
    trainer, seen = watched(
        tmp_path, steps=3, eval={"every": 0}, distill=RECIPE["distill"] | {"move": None, "every": 1}
    )
    trainer.run()
    first, last = seen[0].theta, seen[-1].theta
    assert any(not torch.equal(first[name], value) for name, value in last.items()), (
        "the test needs a policy that changes"
    )


def test_candidate_policy_is_measured_on_held_out_prompts(tmp_path):
    trainer, _ = watched(tmp_path)
    calls, submit, try_move, messages = [], trainer.rollouts.submit, trainer.distill.try_move, []

    def spied(jobs, **options):
        calls.append(([job.prompt_ids for job in jobs], jobs[0].sparsity))
        return submit(jobs, **options)

    def measured(step, rollouts):
        messages.append(try_move(step, rollouts))
        return messages[-1]

    trainer.rollouts.submit, trainer.distill.try_move, trainer.step = spied, measured, 2
    with trainer.logger:
        trainer.try_move(trainer.distill)
    [(prompts, sparsity)], [text] = calls, messages
    assert sparsity.evict.budget == 8
    assert prompts == [list(example.prompt_ids) for example in trainer.held_out[0]][:24]
    assert "rkv:8+2" in text


def test_run_starts_from_a_saved_adapter(tmp_path):
    trainer, _ = watched(tmp_path / "first", steps=2, eval={"every": 0})
    trainer.run()
    saved = Adapter.load(tmp_path / "first" / "sparse_adapter")
    begun, seen = watched(
        tmp_path / "second",
        steps=2,
        eval={"every": 0},
        distill=RECIPE["distill"] | {"adapter": str(tmp_path / "first" / "sparse_adapter"), "rank": 16, "move": None},
    )
    now = begun.distill.distiller.adapter()
    assert now.rank == saved.rank == 4
    assert all(torch.equal(b, now.weights[name][1]) for name, (_, b) in saved.weights.items())
    begun.run()
    assert seen
    with pytest.raises(SettingError, match=r"adapter_config\.json"):
        watched(tmp_path / "third", distill={"adapter": str(tmp_path)})


def test_distill_first_trains_only_the_adapter(tmp_path):
    plain, run = distilling_run(tmp_path / "plain", None), distilling_run(tmp_path / "run", FIRST)
    prompts = {trainer: [] for trainer in (plain, run)}
    for trainer, seen in prompts.items():
        update = trainer.updater.update

        def updated(batch, *rest, seen=seen, update=update):
            seen.append([rollout.prompt_ids for rollout in batch.rollouts])
            return update(batch, *rest)

        trainer.updater.update = updated
    start = {name: value.detach().clone() for name, value in run.learner.full_parameters()}
    distiller, calls = run.distill.distiller, []
    step, train_step = distiller.step, run.train_step

    def distil(rollouts, advantages=None, minibatches=None):
        still = all(torch.equal(start[name], value) for name, value in run.learner.full_parameters())
        calls.append((len(rollouts), advantages is not None, distiller.steps, still))
        return step(rollouts, advantages, minibatches)

    def first_train_step():
        weights = [
            dict(model.named_parameters()) for model in (run.rollouts.engine.model, run.rollouts.engine.sparse_model)
        ]
        assert any(not torch.equal(weights[0][f"{n}.weight"], weights[1][f"{n}.weight"]) for n in adapted), "merged"
        run.train_step = train_step
        train_step()

    adapted = list(distiller.adapter().weights)
    distiller.step, run.train_step = distil, first_train_step
    plain.run()
    run.run()
    assert calls[:3] == [(5, False, 0, True), (5, False, 2, True), (5, False, 4, True)]
    assert [rewarded for _, rewarded, *_ in calls[3:]] == [True, True], "advantages are used from the first step on"
    assert prompts[run] == prompts[plain], "the run's prompts are those of a run without distill.first"
    first = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert (first["step"], first["kind"]) == (0, "distilled-first")
    assert re.search(r"15 rollouts .*divergence .* 0\.", first["message"])
    assert (tmp_path / "run" / "checkpoints" / "step-00000000").exists(), "a crash after it does not repeat it"


@pytest.mark.parametrize(
    "changes",
    [
        {"sparsity": {"select": {"method": "block-topk", "budget": 6, "block": 2, "dense_layers": 1}}},
        {"learner": {"lora": {"rank": 4, "alpha": 8.0}}},
        {"control": {"enabled": True, "vetoed": 0.05, "on_violation": "adapt"}},
    ],
    ids=["selector", "lora", "control"],
)
def test_distill_first_with_selector_lora_and_control(tmp_path, changes):
    tree = RECIPE | {"out": str(tmp_path / "run"), "steps": 1, "eval": {"every": 0}}
    changes = {"distill": {"move": None, "first": FIRST}} | changes
    changes["distill"] = {"move": None, "first": FIRST} | changes["distill"]
    tree |= {name: (RECIPE.get(name, {}) if name != "sparsity" else {}) | part for name, part in changes.items()}
    trainer = Trainer(read_tree(tree), stream=io.StringIO())
    requests, submit = [], trainer.rollouts.submit

    def spied(jobs, **options):
        key = (jobs[0].sampling.seed, tuple(job.prompt_index for job in jobs))
        requests.append(([job.prompt_ids for job in jobs], key, jobs[0].sparsity, {job.record for job in jobs}))
        return submit(jobs, **options)

    trainer.rollouts.submit = spied
    trainer.run()
    first = requests[:3]
    assert len({str(prompts) for prompts, *_ in first}) == len({key for _, key, *_ in first}) == 3
    assert all(sparsity == requests[3][2] for _, _, sparsity, _ in first), "the run's first policy"
    assert all(records == {sparsity.evict is not None} for _, _, sparsity, records in first)
    run_prompts = [
        list(example.prompt_ids) for example in PromptStream(trainer.stream.dataset, trainer.config.seed).next(15)
    ]
    assert [p for prompts, *_ in first for p in prompts] != run_prompts, "another order than the run's"
    assert len(trainer.distill.divergences) == 3
    assert any(b.abs().max() > 0 for _, b in trainer.distill.distiller.adapter().weights.values())


def test_distill_first_resumes_after_a_stop(tmp_path):
    uninterrupted, stopped = (
        distilling_run(tmp_path / "uninterrupted", FIRST),
        distilling_run(tmp_path / "stopped", FIRST),
    )
    assert uninterrupted.run()

    def stop_after_a_batch(trainer):
        first_step = trainer.distill.first_step

        def and_stop(*arguments):
            first_step(*arguments)
            trainer.stop.requested = True

        trainer.distill.first_step = and_stop
        assert not trainer.run()

    stop_after_a_batch(stopped)
    again = distilling_run(tmp_path / "stopped", FIRST, resume=True)
    assert len(again.distill.divergences) == 1
    stop_after_a_batch(again)
    resumed = distilling_run(tmp_path / "stopped", FIRST, resume=True)
    assert len(resumed.distill.divergences) == 2, "a second stop keeps the second batch"
    for _ in range(2):  # killed at the first step: the last checkpoint is from before the first evaluation
        resumed.train_step = exit
        with pytest.raises(SystemExit):
            resumed.run()
        resumed = distilling_run(tmp_path / "stopped", FIRST, resume=True)
        assert len(resumed.distill.divergences) == 3
    assert resumed.run()
    for file in ("metrics.jsonl", "evals.jsonl", "events.jsonl"):
        one, other = (
            [without_clocks(json.loads(line)) for line in (tmp_path / name / file).read_text().splitlines()]
            for name in ("uninterrupted", "stopped")
        )
        assert len(one) == (1 if file == "events.jsonl" else 2)
        assert one == other
    late = distilling_run(tmp_path / "stopped", FIRST | {"steps": 5}, resume=True)
    assert late.run()
    assert "distill.first: " in late.logger.stream.getvalue()
    assert len(late.distill.divergences) == 3, "no batch was added"
    one, other = (Adapter.load(tmp_path / name / "sparse_adapter").weights for name in ("uninterrupted", "stopped"))
    assert all(torch.equal(b, other[name][1]) for name, (_, b) in one.items())


FIRST_ON_A_RANK = """
import json, sys
from pathlib import Path

import torch
from distill_runs import FIRST, distilling_run

out = Path(sys.argv[1])
run = distilling_run(out / "run", FIRST)
distiller, learner, world, shares, still = run.distill.distiller, run.learner, run.world, [], []
def theta():
    return {name: value.detach().clone() for name, value in learner.full_parameters()}
def phi():
    return {f"{name}.{i}": part for name, pair in distiller.adapter().weights.items() for i, part in enumerate(pair)}
def same_everywhere(tensors):
    one, other = world.all_gather(tensors)
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())

begun, step = theta(), distiller.step
def watched(rollouts, advantages=None, minibatches=None):
    if advantages is None:  # before the first step
        shares.append([rollout.prompt_ids for rollout in rollouts])
        now = theta()
        still.append(all(torch.equal(value, now[name]) for name, value in begun.items()))
    metrics = step(rollouts, advantages, minibatches)
    measured.append([metrics["acceptance_mean"], metrics["acceptance_tail"]])
    return metrics
distiller.step, measured = watched, []

checks, first = {}, run.distill_first
def distill_first(stage):
    first(stage)
    checks["phi after first"] = same_everywhere(phi())
    checks["sparse policy after first"] = same_everywhere(dict(run.rollouts.engine.sparse_model.named_parameters()))
    checks["phi was trained"] = any(value.any() for name, value in phi().items() if name.endswith(".1"))
run.distill_first = distill_first
assert run.run()
checks["theta stood still"] = all(world.all_gather(all(still)))
checks["theta"], checks["phi"] = same_everywhere(theta()), same_everywhere(phi())
checks["theta was trained"] = any(not torch.equal(value, begun[name]) for name, value in theta().items())
for which in ("model", "sparse_model"):
    checks[f"engine's {which}"] = same_everywhere(dict(getattr(run.rollouts.engine, which).named_parameters()))
report = {"checks": checks, "shares": world.all_gather(shares)}
report["divergences"] = world.all_gather(run.distill.divergences)
report["acceptances"] = world.all_gather(measured)
if world.rank == 0:
    (out / "report.json").write_text(json.dumps(report))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_distill_first_on_two_ranks(tmp_path):
    """Each rank trains φ on its share of a batch; afterwards both hold the same φ and θ."""
    script = tmp_path / "worker.py"
    script.write_text(FIRST_ON_A_RANK)
    fork_two_ranks(script, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [name for name, holds in report["checks"].items() if not holds] == []
    assert [[len(share) for share in shares] for shares in report["shares"]] == [[3, 3, 3], [2, 2, 2]]
    alone = distilling_run(tmp_path / "alone", FIRST)
    prompts = PromptStream(alone.stream.dataset, ~alone.config.seed).next(15)
    for batch, (one, other) in enumerate(zip(*report["shares"])):
        batch_prompts = [list(example.prompt_ids) for example in prompts[5 * batch : 5 * batch + 5]]
        assert (one, other) == (batch_prompts[::2], batch_prompts[1::2])
    one, other = report["divergences"]
    assert one == other
    assert len(one) == 3
    one, other = report["acceptances"]
    assert one == other, "of all ranks' tokens"
    event = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert (event["step"], event["kind"]) == (0, "distilled-first")


def test_run_with_a_selector_and_lora(tmp_path):
    """The learner's LoRA belongs to θ: φ reads the engine's copy of the merged weights."""
    select = {"method": "block-topk", "budget": 6, "block": 2, "dense_layers": 1}
    distill = RECIPE["distill"] | {"move": None}
    rows = trained(
        tmp_path / "run",
        steps=2,
        sparsity={"select": select},
        distill=distill,
        learner=RECIPE["learner"] | {"lora": {"rank": 4, "alpha": 8.0}},
        eval={"every": 0},
    )
    assert ["distill/kl" in row for row in rows] == [False, True], "every second step"
    assert rows[1]["distill/kl"] >= 0
    assert rows[1]["distill/drift"] < 0.5
    assert rows[1]["distill/tokens"] <= 3 * 4 * 8


def test_step_without_sparse_rollouts_distils_nothing(tmp_path, monkeypatch):
    veto_everything(monkeypatch)
    rows = trained(
        tmp_path / "run",
        steps=2,
        objective={"correction": "reroll"},
        eval={"every": 0},
        distill=RECIPE["distill"] | {"move": None, "every": 1},
    )
    assert [row["mismatch/rerolled"] for row in rows] == [1, 1]
    assert not any("distill/kl" in row for row in rows)

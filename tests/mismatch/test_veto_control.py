"""The controller that counts vetoed rollouts: how sure it is, what it moves, and that it moves a real run."""

import copy
import json
from importlib.resources import files

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import oracle
from alula import Engine, Evict, Sampling, Schedule, Sparsity
from alula.demo.problems import HintedPointer, write_problems
from alula.demo.tiny_model import WarmUp, build_warm_model
from alula.engine.rollout import Span
from alula.errors import SettingError
from alula.mismatch.control.controller import BudgetController
from alula.mismatch.control.monitor import Monitor, resolve_control
from alula.objective.veto import vetoed
from alula.settings import ControlSettings, MonitorSettings
from command_line import alula

PROMPTS, SAMPLES, LIMIT = 32, 8, 0.1
LADDER = (16, 32, 64, 128)
CONTROL = ControlSettings(enabled=True, on_violation="adapt", vetoed=LIMIT, ladder=LADDER)


def controller(budgets=(16, 16, 32), **changes) -> BudgetController:
    return BudgetController(Schedule(budgets, 40), CONTROL.model_copy(update=changes), "evict", max_length=100)


def counts(rng: np.random.Generator, share: float, alike: float = 2.0) -> np.ndarray:
    """Vetoed rollouts of every prompt; prompts differ, as hard ones break more often."""
    return rng.binomial(SAMPLES, rng.beta(alike * share, alike * (1 - share), PROMPTS))


def of() -> np.ndarray:
    return np.full(PROMPTS, SAMPLES)


@pytest.mark.slow
def test_false_alarms_are_as_rare_as_stated():
    """The worst case that is no violation: exactly the limit, rollouts of a prompt alike."""
    rng, rate, steps = np.random.default_rng(0), 100.0, 4000
    one = controller(on_violation="warn", false_alarm_steps=rate)
    alarms = sum(one.observe_vetoes(counts(rng, LIMIT), of()) is not None for _ in range(steps))
    assert alarms <= steps / rate + 2 * np.sqrt(steps / rate)


@pytest.mark.parametrize(("share", "steps"), [(0.45, 1), (0.25, 8)])
def test_too_many_are_found_soon(share, steps):
    for seed in range(20):
        rng, one = np.random.default_rng(seed), controller(on_violation="warn")
        assert any(one.observe_vetoes(counts(rng, share), of()) for _ in range(steps))


def test_every_bin_rises_a_rung_until_the_ladder_ends():
    one, bad = controller(), of()
    event = one.observe_vetoes(bad, of())
    assert (event.action, event.before, event.after, event.share) == ("rise", (16, 16, 32), (32, 32, 64), 1.0)
    said = "100.0% of the rollouts are vetoed, confidently more than 10%; budget 16..32 -> 32..64."
    assert event.describe(one.control) == said
    assert one.schedule.budgets == (32, 32, 64)
    assert one.observe_vetoes(bad, of(), version=0) is None, "drawn under the old budgets"
    assert one.observe_vetoes(bad, of(), version=1).after == (64, 64, 128)
    event = one.observe_vetoes(bad, of())
    assert event.describe(one.control).endswith("; budget 64..128 -> 128."), "the largest cannot rise, the others do"
    assert one.schedule.budgets == (128, 128, 128)
    assert one.observe_vetoes(bad, of()).action == "saturated"


def test_the_other_reactions():
    warned, dense, stopped = (controller(on_violation=mode) for mode in ("warn", "dense", "stop"))
    assert warned.observe_vetoes(of(), of()).action == "warn"
    assert warned.schedule.budgets == (16, 16, 32)
    assert dense.observe_vetoes(of(), of()).action == "dense"
    assert dense.schedule.budgets == (100, 100, 100)
    assert stopped.observe_vetoes(of(), of()).action == "stop"
    assert stopped.stopped
    assert stopped.observe_vetoes(of(), of()) is None
    assert controller(vetoed=None, tau=0.5).observe_vetoes(of(), of()) is None


@pytest.mark.parametrize(("share", "falls"), [(0.0, True), (0.06, False)])
def test_a_tail_far_above_tau_lowers_budgets_only_where_vetoes_are_rare(share, falls):
    rng, one = np.random.default_rng(1), controller((64, 64, 64), tau=0.8, patience=1)
    positions = np.tile(np.arange(100), PROMPTS)
    prompts = np.repeat(np.arange(PROMPTS), 100)
    for _ in range(60):
        one.observe(np.ones(len(positions)), positions, prompts)
        one.observe_vetoes(counts(rng, share) if share else np.zeros(PROMPTS, int), of())
    assert (min(one.schedule.budgets) < 64) == falls
    assert max(one.schedule.budgets) <= 64


def test_a_resumed_controller_continues_exactly():
    rng = np.random.default_rng(2)
    steps = [counts(rng, 0.14) for _ in range(60)]
    whole, first, second = controller(), controller(), controller()
    for step in steps[:17]:
        assert whole.observe_vetoes(step, of()) == first.observe_vetoes(step, of())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in steps[17:]:
        assert whole.observe_vetoes(step, of()) == second.observe_vetoes(step, of())
    assert whole.version > 0
    assert whole.state_dict() == second.state_dict()


def test_evidence_against_another_limit_is_not_taken_over():
    rng, first = np.random.default_rng(3), controller(tau=0.8)
    positions, prompts = np.tile(np.arange(100), PROMPTS), np.repeat(np.arange(PROMPTS), 100)
    for _ in range(3):
        first.observe(np.full(len(positions), 0.9), positions, prompts)
        first.observe_vetoes(counts(rng, 0.12), of())
    state = json.loads(json.dumps(first.state_dict()))
    assert first.many_vetoes.log_m.any()
    assert first.high.log_m.any()
    other_tail, other_limit = controller(tau=0.7), controller(tau=0.8, vetoed=0.3)
    other_tail.load_state_dict(state)
    other_limit.load_state_dict(state)
    assert not other_tail.high.log_m.any()
    assert other_tail.shares() == pytest.approx([np.nan] * 3, nan_ok=True)
    np.testing.assert_array_equal(other_tail.many_vetoes.log_m, first.many_vetoes.log_m)
    assert not other_limit.many_vetoes.log_m.any()
    assert other_limit.rollouts == 0
    np.testing.assert_array_equal(other_limit.high.log_m, first.high.log_m)
    assert other_limit.schedule == first.schedule


def test_settings():
    with pytest.raises(SettingError, match="needs one of them"):
        controller(vetoed=None)
    with pytest.raises(SettingError, match=r"vetoed=1\.5: should be less than 1"):
        ControlSettings(vetoed=1.5)
    evicting = Sparsity(Evict("streaming", 64))
    with pytest.raises(SettingError, match=r"or control\.vetoed"):
        resolve_control(ControlSettings(enabled=True), evicting, 400)
    assert resolve_control(ControlSettings(enabled=True, vetoed=0.2), evicting, 400).vetoed == 0.2
    control = CONTROL.model_copy(update={"tau": 0.8, "ladder": (64, 400)})
    with pytest.raises(SettingError, match=r"monitor\.rollouts=0.* at 0\.8"):
        Monitor(MonitorSettings(rollouts=0), evicting, None, 400, control)


# --- with a real engine --------------------------------------------------------------------------------------------

ASKED = [[int(t) for t in row] for row in np.random.default_rng(0).integers(2, 96, (12, 6))]
LONGEST = 36


@pytest.fixture(scope="module")
def engine():
    sharp = copy.deepcopy(oracle.custom_model(3, layers=2))
    with torch.no_grad():
        sharp.model.base_model.norm.weight.mul_(12)  # sure of every token, so that under a small budget surely wrong
    return Engine(sharp, page=4, kv_memory="4MiB", max_rows=48, lookahead=4)


def monitored(engine: Engine, **options) -> Monitor:
    control = CONTROL.model_copy(update={"ladder": (6, 12, 24, 40), "false_alarm_steps": 20.0})
    return Monitor(
        MonitorSettings(rollouts=0),
        Sparsity(Evict("streaming", 6, buffer=2, window=2, sinks=1)),
        engine,
        LONGEST,
        control,
        **options,
    )


def sampled(engine: Engine, monitor: Monitor, seed: int):
    sampling = Sampling(n=2, max_new_tokens=30, seed=seed, ignore_eos=True)
    made = engine.generate(ASKED, sampling, monitor.recommended)
    return made, [vetoed(rollout, dense) for rollout, dense in zip(made, engine.score(made))]


def test_an_impossible_rung_raises():
    sparsity = Sparsity(Evict("rkv", 32, buffer=4, window=4, sinks=2))
    with pytest.raises(SettingError, match=r"control\.ladder=\[4, 64\]: .*at least 6\."):
        resolve_control(ControlSettings(enabled=True, vetoed=0.05, ladder=[4, 64]), sparsity, 256)


@pytest.mark.slow
def test_a_policy_with_many_vetoes_gets_the_budget_it_needs(engine):
    monitor, shares, said = monitored(engine), [], []
    for seed in range(12):
        made, bad = sampled(engine, monitor, seed)
        shares.append(np.mean(bad))
        said += monitor.count_vetoes(made, bad, 2).events
    assert shares[0] > 0.5
    assert shares[-1] == 0.0
    assert monitor.recommended.evict.budget.budgets[0] > 6
    assert "budget 6 -> 12." in said[0]
    metrics = monitor.step(made).metrics
    assert metrics["schedule/version"] == monitor.controller.version, "logged although no tail is watched"


def test_ranks_count_each_others_rollouts(engine):
    whole = monitored(engine)
    made, bad = sampled(engine, whole, 0)
    counted = np.reshape(bad, (-1, 2)).sum(1)
    prompts = np.array([rollout.prompt_index for rollout in made[::2]])
    halves = [(counted[rank::2], np.zeros(6, np.int64), prompts[rank::2]) for rank in range(2)]
    part = monitored(engine, gather=lambda mine: halves)
    counted = whole.count_vetoes(made, bad, 2)
    assert part.count_vetoes(made[:12], bad[:12], 2) == counted
    assert counted.events
    assert part.controller.state_dict() == whole.controller.state_dict()


def test_vetoes_of_older_weights_do_not_count(engine):
    """One token of older weights in a rollout is enough: its whole prompt is left out."""
    monitor, fresh = monitored(engine), monitored(engine)
    made, bad = sampled(engine, monitor, 0)
    for rollout in made[1::2]:
        rollout.spans = [Span(1, 6), Span(len(rollout) - 1, 7)]
    for rollout in made[::2]:
        rollout.spans = [Span(len(rollout), 7)]
    assert monitor.count_vetoes(made, bad, 2, version=7).events == ()
    assert monitor.controller.state_dict() == fresh.controller.state_dict()
    for rollout in made:
        rollout.spans = [Span(len(rollout), 7)]
    assert monitor.count_vetoes(made, bad, 2, version=7).events


@pytest.mark.slow
def test_a_run_raises_its_budget_and_reports_it(tmp_path):
    """From the command line: a sharp model, a budget that breaks it, without a dense scoring pass too."""
    task = HintedPointer(symbols=12, min_hops=10, max_hops=12)
    warm = WarmUp(problems=64, batch=8, careful_steps=8, mixture_steps=2)
    folder = build_warm_model(tmp_path / "model", task, warm, 0, lambda *_: None)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(12)
    model.save_pretrained(folder)
    data = tmp_path / "train.jsonl"
    write_problems(task.dataset(64, 1000), data)
    objectives = {
        "naive": "{correction: none}",
        "reroll": "{correction: reroll}",
        "unscored": "{skip_scoring: true, correction: none}",
    }
    for name, objective in objectives.items():
        out = tmp_path / name
        arguments = [
            "train",
            files("alula.demo") / "demo.yaml",
            f"model.source={folder}",
            f"data.source={data}",
            "steps=4",
            f"eval.data.source={data}",
            f"out={out}",
            "eval.every=0",
            f"objective={objective}",
            "monitor.rollouts=0",
            "sparsity.evict={method: streaming, budget: 8, buffer: 4, window: 2, sinks: 1}",
            "control={enabled: true, on_violation: adapt, vetoed: 0.1, ladder: [8, 16, 32]}",
        ]
        assert alula(*arguments) == 0
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        assert next(e["message"].rpartition("; ")[2] for e in events if e["kind"] == "vetoes") == "budget 8 -> 16."
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert steps[0]["schedule/budget/0"] == 8
        assert steps[-1]["schedule/budget/0"] > 8

"""Calibrate, plan, verify, train under the schedule, report: all steps on the command line, on the CPU."""

import json
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from alula.config.load import load_config
from alula.demo.problems import HintedPointer, write_problems
from alula.demo.tiny_model import WarmUp, build_warm_model
from alula.mismatch.calibrate.file import Calibration
from alula.mismatch.control.monitor import resolve_control
from alula.sparsity.schedule import Schedule
from command_line import alula
from toy import without_clocks

DATA = ["--data", "task:copy-last", "--option", "symbols=26", "--option", "prefix=20"]
SIZES = ["--length", "64", "--prompts", "32", "--kv-memory", "16MiB", "--max-rows", "160"]
MODEL = "shape:tiny-llama"
RECIPES = Path(__file__).parents[2] / "recipes"

pytestmark = pytest.mark.xdist_group("sparrow")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sparrow")


@pytest.fixture(scope="module")
def calibration(folder):
    path = folder / "calibration.json"
    methods = "block-topk:dense_layers=1,streaming:buffer=4:window=2"
    code = alula(
        "calibrate",
        MODEL,
        *DATA,
        *SIZES,
        "--methods",
        methods,
        "--pages",
        4,
        "--budgets",
        "12,24,64",
        "--bin",
        22,
        "--sweep",
        "--out",
        path,
    )
    assert code == 0
    return path


@pytest.fixture(scope="module")
def schedule(calibration, folder):
    path = folder / "schedule.json"
    assert alula("plan", calibration, "--tau", 0.6, "--hardware", "1,0.01", "--batch", 16, "--out", path) == 0
    return path


def test_calibration(calibration):
    loaded = Calibration.load(calibration)
    assert loaded.model == MODEL
    assert loaded.floor.overall > 1 - 1e-5
    families = loaded.families()
    assert [(f.kind, f.method, [m.budget for m in ms]) for f, ms in families.items()] == [
        ("evict", "streaming", [12, 24, 64]),
        ("select", "block-topk", [12, 24, 64]),
    ]
    for measured in families.values():
        assert measured[0].tail.overall < measured[1].tail.overall < measured[2].tail.overall
    assert len(loaded.growing) == 1, "a growing schedule for the evictor"
    ElementTree.fromstring(calibration.with_suffix(".svg").read_text())


def test_plan(schedule, calibration, folder, capsys):
    planned = Schedule.load(schedule)
    assert (planned.model, planned.notes["tau"], planned.width) == (MODEL, 0.6, 22)
    for suffix in (".pareto.svg", ".tails.svg"):
        ElementTree.fromstring(schedule.with_suffix(suffix).read_text())
    assert alula("plan", calibration, "--tau", 0.9999999, "--out", folder / "none.json") == 2
    printed = capsys.readouterr()
    assert "| 0.915 |" in printed.out
    assert "tau=1.000 is out of reach" in printed.err
    assert not (folder / "none.json").exists()


def test_verification_on_fresh_rollouts(schedule, folder, capsys):
    out = folder / "verified.json"
    code = alula("calibrate", MODEL, *DATA, *SIZES, "--verify", schedule, "--out", out)
    result = json.loads(out.read_text())
    assert code == (1 if result["violated"] else 0)
    assert result["violated"] == []
    assert "tau 0.6000 holds" in capsys.readouterr().out
    assert alula("calibrate", MODEL, *DATA, *SIZES, "--verify", schedule, "--out", out, "--tau", 0.999) == 1
    assert json.loads(out.read_text())["violated"]


def recipe(folder, schedule, name: str, **changes) -> str:
    """A run under the schedule; `changes` are settings on top."""
    planned = Schedule.load(schedule)
    settings = {k: v for k, v in planned.notes["options"].items() if k not in ("block", "protect_prompt")}
    part = "select" if planned.block else "evict"
    used = {"method": planned.method, "budget": str(schedule), **settings, **({"block": 4} if planned.block else {})}
    tree = {
        "steps": 3,
        "out": str(folder / name),
        "model": {"source": MODEL},
        "data": {"source": "task:copy-last", "size": 256, "options": {"symbols": 26, "prefix": 20}},
        "rewards": {"use": ["task:copy-last"]},
        "sparsity": {part: used | changes.pop("sparsity", {})},
        "sampling": {"prompts": 6, "n": 2, "max_new_tokens": 30},
        "objective": {"correction": "tis"},
        "learner": {"lr": 1e-3, "activation_checkpointing": False},
        "engine": {"kv_memory": "8MiB", "page": 4},
        "eval": {"every": 0},
        "monitor": {"rollouts": 6},
        **changes,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def rows(folder, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_training_under_the_schedule_and_a_report(schedule, folder):
    planned = Schedule.load(schedule)
    assert alula("train", recipe(folder, schedule, "fixed")) == 0
    for row in rows(folder, "fixed"):
        assert 0 < row["mismatch/alpha_p05"] <= row["mismatch/alpha_p50"] <= 1
        assert row["mismatch/tail"] == min(v for k, v in row.items() if k.startswith("mismatch/tail/"))
        assert row["schedule/budget/0"] == planned.budgets[0]
        assert 0 <= row["mismatch/below_tau"] <= 1
        assert row["time/mismatch"] < row["time/rollout"]
    report = folder / "report.html"
    assert alula("report", folder / "fixed", "--out", report) == 0
    assert "Tail acceptance" in report.read_text()


def test_a_controlled_run_survives_a_stop(schedule, folder):
    """tau is above the tail of the schedule: budgets rise, and a resumed run continues with the current schedule."""
    control = {"enabled": True, "tau": 0.99, "on_violation": "adapt", "false_alarm_steps": 1, "ladder": [12, 24, 64]}
    checkpoint = {"every": 2}
    one_run = recipe(folder, schedule, "whole", control=control, steps=4, checkpoint=checkpoint)
    parts = recipe(folder, schedule, "parts", control=control, steps=4, checkpoint=checkpoint)
    assert alula("train", one_run) == 0
    assert alula("train", parts, "steps=2") == 0
    assert alula("train", parts, "--resume") == 0
    uninterrupted, resumed = ([without_clocks(row) for row in rows(folder, name)] for name in ("whole", "parts"))
    assert uninterrupted[-1]["schedule/version"] > 0
    assert uninterrupted == resumed
    events = [json.loads(line) for line in (folder / "whole" / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "tail" and "budget" in event["message"] for event in events)


def test_a_violated_tail_stops_the_run(schedule, folder, capsys):
    control = {"enabled": True, "tau": 0.99, "on_violation": "stop", "false_alarm_steps": 1, "ladder": [12, 24, 64]}
    path = recipe(folder, schedule, "stopped", control=control, steps=8)
    assert alula("train", path) == 130
    assert 0 < len(rows(folder, "stopped")) < 8
    assert json.loads((folder / "stopped" / "status.json").read_text())["state"] == "stopped"
    assert "the run stops" in (folder / "stopped" / "events.jsonl").read_text()
    capsys.readouterr()
    assert alula("train", path, "--resume") == 130, "nothing has changed, so it stops again"
    assert "control.on_violation=stop; continue with --resume control.on_violation=adapt" in "".join(
        capsys.readouterr()
    )
    assert alula("train", path, "--resume", "control.on_violation=warn", "steps=2") == 0


MISFITS = {
    "another model": (
        {"model": {"source": "shape:tiny-qwen3"}},
        f"model={MODEL}, not model=shape:tiny-qwen3",
    ),
    "another method": ({"sparsity": {"method": "quest"}}, "method=block-topk, not method=quest"),
    "another page": ({"sparsity": {"block": 2}}, "planned with block=4; write block-topk:"),
    "other settings": ({"sparsity": {"dense_layers": 2}}, "planned with dense_layers=1; write block-topk:"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_schedule_that_does_not_fit_raises(what, calibration, folder, capsys):
    path = folder / "selecting.json"
    complete = Calibration.load(calibration)
    selectors = [m for m in complete.measured if m.family.kind == "select"]
    Calibration(complete.model, complete.floor, tuple(selectors), notes=complete.notes).save(folder / "selectors.json")
    assert alula("plan", folder / "selectors.json", "--tau", 0.6, "--out", path) == 0
    changes, reason = MISFITS[what]
    for check in (["--check"], []):
        assert alula("train", recipe(folder, path, what.replace(" ", "-"), **changes), *check) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RECIPES.glob("sparrow-*.yaml")), ids=lambda path: path.stem)
def test_sparrow_recipes_enable_the_controller(path):
    """The controller has a tau: a setting, or the tau of the planned schedule."""
    config = load_config(path)
    assert config.control.enabled
    assert resolve_control(config.control, config.sparsity, 32000).tau in (0.97, 0.86)


def test_controller_of_the_toy_recipe_changes_budgets(folder):
    assert alula("train", RECIPES / "sparrow-toy.yaml", "steps=8", f"out={folder / 'toy'}", "eval.every=0") == 0
    metrics = rows(folder, "toy")
    assert all("mismatch/tail" in row for row in metrics)
    assert metrics[-1]["schedule/version"] > 0


def test_the_demo_model_from_calibration_to_report(tmp_path):
    """The demo's model, problems and recipe with an evictor and a selector: planned, verified and used in training."""
    task = HintedPointer(symbols=12, min_hops=10, max_hops=12)
    warm = WarmUp(problems=64, batch=8, careful_steps=8, mixture_steps=2)
    model = build_warm_model(tmp_path / "model", task, warm, 0, lambda *_: None)
    data = tmp_path / "train.jsonl"
    write_problems(task.dataset(128, 1000), data)
    common = [model, "--data", data, "--length", 80, "--prompts", 32, "--kv-memory", "32MiB", "--max-rows", 128]
    methods = ["--methods", "streaming:budget=48:buffer=8:window=4:sinks=1&block-topk:dense_layers=0", "--pages", 4]
    calibration, schedule = tmp_path / "calibration.json", tmp_path / "schedule.json"
    assert alula("calibrate", *common, *methods, "--budgets", "16,32,80", "--bin", 40, "--out", calibration) == 0
    assert alula("plan", calibration, "--tau", 0.5, "--kv-memory", "1MiB", "--out", schedule) == 0
    checked = ["--verify", schedule, "--out", tmp_path / "verified.json"]
    assert alula("calibrate", *common, *checked) == 0
    settings = [
        f"model.source={model}",
        f"data.source={data}",
        f"eval.data.source={data}",
        "steps=2",
        "monitor.rollouts=8",
        f"out={tmp_path / 'run'}",
        "objective.correction=tis",
        f"sparsity.select={{method: block-topk, budget: {schedule}, block: 4, dense_layers: 0}}",
    ]
    evict = "sparsity.evict={{method: streaming, budget: {}, buffer: 8, window: 4, sinks: 1}}"
    demo = files("alula.demo") / "demo.yaml"
    assert alula("train", demo, *settings, evict.format(40)) == 2, "the tail is unknown with another evictor"
    assert alula("train", demo, *settings, evict.format(48)) == 0
    assert all(0 < row["mismatch/tail"] <= 1 for row in rows(tmp_path, "run"))
    assert alula("report", tmp_path / "run", "--out", tmp_path / "report.html") == 0
    assert "Tail acceptance" in (tmp_path / "report.html").read_text()

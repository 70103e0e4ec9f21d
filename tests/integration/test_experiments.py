"""The evidence pipeline in miniature: warm-up, probe, runs side by side, raw lines, tables, figures."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import figures
import judge
import learned_reward
import run
import tables
import tips
from arms import QUESTIONS
from beds import BEDS, GSM8K, PROGRAMS, TINY, solution
from choice import TAU, below_threshold, chosen_budgets
from lost_tokens import lost_counts

from alula.config.load import load_config
from alula.demo.tiny_model import WarmUp
from alula.sparsity.schedule import Schedule

BUDGETS = {"rkv": 32, "snapkv": 32, "streaming": 32, "keydiff": 32}


def outcome(seed, *accuracy):
    evals = [{"step": 8 * i, "policy": "dense", "accuracy": a} for i, a in enumerate(accuracy)]
    return {"seed": seed, "evals": evals}


def test_an_arm_has_one_colour_in_all_figures():
    colour = {name: figures.look_of(name)["colour"] for name in figures.ARMS[:9]}
    assert len(set(colour.values())) == 9
    for arm, correction in (
        ("dense, sparse-rl", "dense"),
        ("rkv naive", "naive"),
        ("keydiff strict", "strict"),
        ("rkv chosen +2, reroll", "reroll"),
        ("sparse-rl, milder", "sparse-rl"),
        ("tis, distilled first", "tis"),
        ("rkv sparse-rl, held at 10 %, distilled", "sparse-rl"),
    ):
        assert figures.look_of(arm)["colour"] == colour[correction], arm
    shared = ["rkv naive", "naive, milder", "rkv naive, held at 5 %", "naive, distilled", "naive, distilled first"]
    assert len({figures.look_of(arm)["dash"] for arm in shared}) == len(shared)


def test_collapse_is_two_evaluations_below_the_start():
    assert not judge.collapsed(outcome(0, 0.8, 0.7, 0.9, 0.9))
    assert judge.collapsed(outcome(0, 0.8, 0.7, 0.9, 0.79))
    assert not judge.collapsed(outcome(0, 0.8, 0.8, 0.8, 0.8))


def test_intervals_over_seeds():
    values = [0.5, 0.6, 0.9]
    mean, half = judge.interval(values)
    assert mean == pytest.approx(np.mean(values))
    assert half == pytest.approx(4.302653 * np.std(values, ddof=1) / np.sqrt(3), rel=1e-4)
    assert judge.interval([0.5])[1] == float("inf")
    dense = [outcome(seed, 0.7, 0.9 + 0.01 * seed) for seed in range(3)]
    near = [outcome(seed, 0.7, 0.89 + 0.01 * seed) for seed in range(3)]
    assert judge.equivalent(judge.against(near, dense))
    assert not judge.equivalent(judge.against([outcome(seed, 0.7, 0.8) for seed in range(3)], dense))
    assert not judge.equivalent(judge.against(near[:2], dense))  # two seeds show nothing of a spread


@pytest.mark.parametrize("bed", BEDS.values(), ids=BEDS)
def test_every_arm_is_a_valid_recipe(bed):
    for question, arms_of in QUESTIONS.items():
        arms = arms_of(bed, dict.fromkeys(BUDGETS, bed.budgets[3]))
        configs = [load_config(bed.recipe, ["model.source=x", "data.source=x", "out=x", *arm.settings]) for arm in arms]
        assert len({arm.name for arm in arms}) == len(arms), question
        assert len({config.model_dump_json() for config in configs}) == len(arms), question


def test_arms_are_chosen_by_name_or_label():
    arms = {arm.label: arm for arm in QUESTIONS["distill"](TINY, BUDGETS)}
    arm = arms["tis, distilled first"]
    assert arm.name == "rkv-32-tis-distill-first"
    for pattern in ("", "tis", "^rkv-32", "distill-first$", "^tis, ", "distilled first$", "-32-tis|nothing"):
        assert arm.matches(pattern), pattern
    for pattern in ("naive", "^32", "^distill", "tis$", "distill$", "^tis-distill", "first, tis"):
        assert not arm.matches(pattern), pattern
    chosen = [label for label, arm in arms.items() if arm.matches("^(tis|rkv-32-naive)$")]
    assert chosen == ["naive", "tis"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--methods", "snapkv", "--question", "compressors,collapse"],
            "--methods snapkv: --question collapse ",
        ),
        (["--methods", "rkv,snapvk", "--question", "collapse"], "in --methods 'snapvk'; did you mean 'snapkv'?"),
        (["--question", "colapse"], "unknown --question 'colapse'; did you mean 'collapse'?"),
        (["--question", "budget", "--bed", "gsm8k"], "--question budget: "),
    ],
    ids=["rkv missing", "compressor", "question", "probe"],
)
def test_invalid_arguments_raise_before_the_warm_up(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(run, "in_a_child", lambda *_: pytest.fail("the warm-up started"))
    monkeypatch.setattr(sys, "argv", ["run.py", "--bed", "tiny", "--work", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as error:
        run.main()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_chosen_budget_is_the_largest_below_the_threshold(tmp_path):
    rows = [
        {"seed": seed, "sparsity": TINY.evictor("rkv", budget), "careful": budget / 100 + seed * 0.05}
        for seed in range(2)
        for budget in TINY.budgets
    ]
    (tmp_path / "probe.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # hint 0.5: tempting below 0.35, which the second model reaches with less KV
    assert [chosen_budgets(TINY, seed, tmp_path)["rkv"] for seed in range(2)] == [32, 28]


def test_gsm8k_solutions_and_prompts(tmp_path, monkeypatch):
    row = {"question": "6 and 7?", "answer": "6 * 7 = <<6*7=42>>42 of them.\n#### 1,042"}
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("ALULA_DATA", str(tmp_path))
    assert solution(row["answer"]) == "6 * 7 = 42 of them.\nThe answer is \\boxed{1,042}."
    GSM8K.write_data(0, tmp_path)
    for name in ("train.jsonl", "held.jsonl"):
        assert json.loads((tmp_path / name).read_text()) == {"prompt": "6 and 7?", "answer": "1,042"}
    assert chosen_budgets(GSM8K, 0, tmp_path)["rkv"] == 64


def test_programs_bed_grades_in_the_sandbox(tmp_path):
    problems = PROGRAMS.task.dataset(24, 0)
    assert problems[3] == PROGRAMS.task.dataset(4, 0)[3]
    texts, records = [p.answer for p in problems], [p.record() for p in problems]
    assert PROGRAMS.grade(texts, records) == [1.0] * 24
    shortcuts = PROGRAMS.grade([p.fields["shortcut"] for p in problems], records)
    assert 0.25 < sum(shortcuts) / 24 < 0.75
    swapped = " ; ".join(reversed(texts[0].removeprefix("def f(x): ").split(" ; ")[:-1]))
    assert PROGRAMS.grade([f"def f(x): {swapped} ; return x"], records[:1]) == [0.0]  # statements in the wrong order
    assert [PROGRAMS.is_shortcut(text) for text in (texts[0], problems[0].fields["shortcut"])] == [False, True]
    words = set(PROGRAMS.task.words)
    assert all(set(f"{p.prompt} {p.answer} {p.fields['shortcut']}".split()) <= words for p in problems)
    PROGRAMS.write(problems, tmp_path / "train.jsonl")
    row = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    assert {"prompt", "answer", "tests", "prelude"} <= row.keys()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1. Give them water each day.\n2. Keep the water clean and cool.\n3. Water in the early morning.", 1.0),
        ("Here:\n1. Give them water each day.\n2. Keep the soil clean and cool.\n", 0.5),
        ("1. Give them water each day.\n2. Give them water each day.\n3. Give them water each day.", 1 / 3),
        ("1. Give them water each day.\n3. Keep the water clean and cool.", 1 / 3),
        ("1. Give them water daily.\n2. Keep the water cool now.\n3. Water them more often.\n4. And then some.", 2 / 3),
        ("1. Waterfalls are not the word.\n2. water", 1 / 6),
        ("Give them water each day.", 0.0),
    ],
)
def test_tips_are_graded_by_number_and_word(answer, expected):
    assert tips.reward(answer, {"answer": "3", "word": "water"}) == pytest.approx(expected)


def test_tips_ask_what_their_reward_checks():
    asked = [tips.problem(f"test/{i}") for i in range(50)]
    assert all(f"exactly {p['answer']} tips" in p["prompt"] and f'"{p["word"]}"' in p["prompt"] for p in asked)
    assert len({p["prompt"] for p in asked}) > 40
    assert tips.problem("test/0") == asked[0]


def test_learned_rewards_leave_accuracy_to_the_verifier(tmp_path):
    rows = [{"seed": 0, "sparsity": TINY.evictor("rkv", b), "careful": 0.1 * i} for i, b in enumerate(TINY.budgets)]
    (tmp_path / "probe.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for planned in learned_reward.planned(TINY, 0, tmp_path):
        settings = ["model.source=x", "data.source=x", "out=x", *planned.arm.settings]
        config = load_config(TINY.recipe, settings)
        terms = {term.name.split(":")[0]: term.weight for term in config.rewards.use}
        learned = planned.arm.label.endswith("learned")
        assert terms == ({"model": 1.0, "task": 0.0} if learned else {"task": 1.0})
        assert config.rewards.correct == ("task:pointer" if learned else None)


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order():
    scores, labels = torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([1, 0, 1, 0])
    assert learned_reward.ranked_right(scores, labels) == pytest.approx((2 + 0.5 + 1) / 4)


def test_transfer_takes_the_budgets_on_either_side_of_the_threshold(tmp_path):
    rows = [
        {"seed": 0, "sparsity": PROGRAMS.evictor("rkv", budget), "tail": TAU + (budget - 44) / 1000}
        for budget in PROGRAMS.budgets
    ]
    (tmp_path / "probe.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert below_threshold(PROGRAMS, 0, tmp_path) == 40
    schedule = tmp_path / "schedule-0.json"
    Schedule((16, 32), width=16).save(schedule)
    arms = {a.label: a for a in QUESTIONS["transfer"](PROGRAMS, {"rkv": 40, "schedule": str(schedule)})}
    assert arms["below, tis"].sparsity.startswith("rkv:40+4")
    assert arms["above, tis"].sparsity.startswith("rkv:48+4")
    config = load_config(PROGRAMS.recipe, ["model.source=x", "data.source=x", "out=x", *arms["schedule, tis"].settings])
    assert config.sparsity.select.budget.budgets == (16, 32)


def test_transfer_table_compares_the_threshold_with_the_outcome(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    steps = {"steps": {"reward/mean": [1.0]}}
    runs = [
        outcome(0, 0.7, 0.9, 0.9) | {"arm": "dense", "sparsity": "dense"} | steps,
        outcome(0, 0.7, 0.5, 0.5) | {"arm": "below, tis", "sparsity": "rkv:40+4,window=4"} | steps,
        outcome(0, 0.7, 0.5, 0.5)
        | {"arm": "schedule, tis", "sparsity": "block-topk:runs/a/schedule-0.json,b=4"}
        | steps,
    ]
    before = {"tail_low": 0.5, "vetoed_rollouts": 0.3, "careful": 0.4, "seed": 0}
    probed = [before | {"sparsity": run["sparsity"], "tail": 0.6 if "rkv" in run["sparsity"] else 0.99} for run in runs]
    for name, lines in (("transfer", runs), ("probe", probed)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "programs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, _, first, second = tables.transfer_table("programs", "transfer").splitlines()
    assert first == "| below, tis | rkv:40+4 | 0 | 0.600 | 0.500 | 30 | 40 | collapses | collapsed | yes | 50 | -40 |"
    assert second == (
        "| schedule, tis | block-topk:schedule-0 | 0 | 0.990 | 0.500 | 30 | 40 | holds | collapsed | no | 50 | -40 |"
    )


def test_lost_tokens_are_counted_by_where_the_answer_has_them_from():
    asked_far, elsewhere, asked_near = [0, 0, [5, 6], [7, 8, 6]], [1, 0, [5, 6], [9, 9]], [2, 0, [5], [5, 7]]
    row = {"target": 2, "text": {"vetoed": [2, 1, 0, -1]}}
    assert lost_counts(row, [asked_far, elsewhere, asked_near, [3, 0, [4], [4]]]) == (3, 2, 1)


WARM = WarmUp(problems=32, batch=8, careful_steps=2, mixture_steps=2)
SMALL = replace(TINY, warm=WARM, budgets=(16, 24, 32), train_problems=32, held_out=8, probe_prompts=2)


@pytest.mark.slow
def test_from_warm_up_to_figure(tmp_path, monkeypatch):
    monkeypatch.setitem(BEDS, "tiny", SMALL)
    for module in (tables, figures):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    command = [
        "run.py",
        "--bed",
        "tiny",
        "--question",
        "collapse",
        "--seeds",
        "1",
        "--jobs",
        "2",
        "--arms",
        "dense-naive|reroll",
        "--work",
        str(tmp_path / "work"),
        "--out",
        str(tmp_path / "results"),
        "steps=2",
        "sampling.prompts=2",
        "eval.every=1",
        "eval.size=4",
    ]
    monkeypatch.setattr(sys, "argv", command)
    run.main()

    arms = {row["arm"]: row for row in tables.raw("collapse", "tiny")}
    assert list(arms) == ["dense", "rkv reroll"]
    assert all(row["state"] == "finished" and len(row["steps"]["reward/mean"]) == 2 for row in arms.values())
    dense, reroll = arms.values()
    assert dense["evals"][0] == reroll["evals"][0]  # the same model and problems
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("metrics.jsonl")}
    run.main()
    assert {path: path.stat().st_mtime_ns for path in written} == written  # finished runs are left alone

    page = tmp_path / "results" / "collapse.md"
    page.write_text("<!-- table outcome tiny collapse -->\nold\n<!-- end -->\n")
    tables.fill(page)
    assert "| dense |" in page.read_text()
    assert "old" not in page.read_text()
    for question in ("collapse", "probe"):
        figures.draw(question, "tiny")
    assert {path.stem for path in (tmp_path / "results").rglob("*.svg")} == {
        "tiny-accuracy",
        "tiny-reward",
        "tiny-length",
        "tiny-careful",
        "tiny-tail",
    }


@pytest.mark.parametrize("page", sorted(tables.RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_the_tables_of_a_results_page_come_from_the_raw_lines(page):
    text = page.read_text()
    assert tables.filled(text) == text, f"run python experiments/tables.py {page.stem}"


class Flaky:
    """Fails `failures` times, then finishes; every attempt is a line of its log."""

    def __init__(self, folder, failures):
        self.folder, self.failures, self.log = folder, failures, folder.with_suffix(".log")

    @property
    def attempts(self):
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    @property
    def finished(self):
        return self.attempts > self.failures

    def __call__(self):
        with self.log.open("a") as log:
            log.write(f"{self.folder.name}\n")
        raise SystemExit(int(not self.finished))


def test_failed_run_is_tried_once_more_after_the_others(tmp_path, capsys):
    flaky = [Flaky(tmp_path / f"fails-{count}", count) for count in (0, 1, 2)]
    run.run_all(flaky, jobs=1, deadline=float("inf"))
    assert [each.attempts for each in flaky] == [1, 2, 2]
    ended = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert ended == ["fails-0: done", "fails-1: failed", "fails-2: failed", "fails-1: done", "fails-2: failed"]

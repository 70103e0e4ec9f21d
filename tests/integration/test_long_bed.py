"""The long beds' scripts: schedules of Sparrow's experiment, gates, arms, tables. Trains nothing."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import gates
import judge
import long_arms
import long_tables
import sparrow
from lines import merge_lines, read_lines, write_lines
from long_beds import LONG_BEDS, SEARCH_TINY
from run import Run

from alula.config.load import load_config

TAILS = {12: [0.9, 0.5, 0.2], 16: [0.95, 0.8, 0.5], 24: [0.99, 0.9, 0.8], 32: [1.0, 0.95, 0.9]}
FOUND = sparrow.Calibrated(replace(SEARCH_TINY, bin=32), TAILS, [(7, 89)] * 3)
"""Three bins of 32 tokens."""


def read_by_hand(budgets):
    """KV tokens read: at every step the budget of the length's bin, or all tokens if there are fewer."""
    at = [budgets[min(length // 32, len(budgets) - 1)] for length in range(7, 96)]
    return sum(min(budget, length) for budget, length in zip(at, range(7, 96))) / sum(range(7, 96))


def test_the_growing_schedule_takes_the_smallest_budget_of_every_bin():
    assert FOUND.arm("a", 0.8) == (12, 16, 24)
    assert FOUND.arm("a", 0.9) == (12, 24, 32)
    assert FOUND.arm("c", 0.8) == (24,)
    assert FOUND.arm("c", 0.5) == (16,)


@pytest.mark.parametrize("tau", [0.8, 0.9])
def test_the_controls_read_as_much_as_the_growing_schedule(tau):
    growing, fixed, turned = (FOUND.arm(name, tau) for name in "abd")
    assert FOUND.read(growing) == pytest.approx(read_by_hand(growing))
    assert len(fixed) == 1
    assert FOUND.read(fixed) == pytest.approx(FOUND.read(growing), abs=0.05)  # budgets come in blocks of 4
    assert FOUND.read(turned) == pytest.approx(FOUND.read(growing), abs=0.05)
    assert list(turned) == sorted(turned, reverse=True)
    assert min(turned) >= 12


@pytest.mark.parametrize("bed", LONG_BEDS.values(), ids=LONG_BEDS)
def test_every_arm_is_a_valid_recipe(bed, tmp_path):
    found = sparrow.Calibrated(bed, {b: [1.0] for b in bed.read_budgets}, [(7, 89)])
    corrections = ("tis", "veto-1e-3")
    arms = [sparrow.planned_arm(found, name, 0.9, c, tmp_path)[0] for name in sparrow.ARMS for c in corrections]
    arms += long_arms.sparse_arms(bed, "rkv", bed.budgets[2]) + long_arms.sparse_arms(bed, "block-topk", 64)
    arms += long_arms.sparse_arms(bed, "streaming", bed.budgets[2], held=5)
    arms += [long_arms.dense_arm(1e-5)]
    for arm in arms:
        config = load_config(bed.recipe, ["model.source=x", "data.source=x", "out=x", *arm.settings])
        assert config.steps == 16


def test_the_control_of_strict_takes_as_many_prompts_as_it_kept(tmp_path):
    strict, *_ = long_arms.sparse_arms(SEARCH_TINY, "rkv", 24)
    run = Run(SEARCH_TINY, strict, 0, tmp_path)
    dense = long_arms.dense_arm(None)
    assert long_arms.fewer(SEARCH_TINY, [run], dense, 32) is None
    run.folder.mkdir(parents=True)
    (run.folder / "status.json").write_text('{"state": "finished"}')
    (run.folder / "metrics.jsonl").write_text('{"mismatch/rejected": 0.2}\n{"mismatch/rejected": 0.3}\n')
    control = long_arms.fewer(SEARCH_TINY, [run], dense, 32)
    assert control is not None
    assert control.settings[-1] == "sampling.prompts=24"


def test_gates_from_raw_lines(tmp_path):
    def probed(sparsity, accuracy, saved=0.0, unread=0.0):
        return {"seed": 0, "sparsity": sparsity, "accuracy": accuracy, "kv_saved": saved, "kv_unread": unread}

    rows = [probed("dense", 0.6), probed("rkv:16+4", 0.2, 0.9), probed("rkv:32+4", 0.58, 0.86)]
    rows += [probed("block-topk:12", 0.1, 0.0, 0.92), probed("block-topk:16", 0.55, 0.0, 0.84)]
    write_lines(tmp_path / "budgets.jsonl", rows)
    text = {"seed": 0, "prompt_tokens": 7, "answer_tokens": 133, "cut_off": 0.03, "choices": 0.3}
    write_lines(tmp_path / "text.jsonl", [text | {"guess": 0.02, "chance": 0.05}])
    found = {gate.gate: gate for gate in gates.gates_of(SEARCH_TINY, 0, tmp_path, ("rkv", "block-topk"))}
    second = found["KV share at 90% of dense, second best"]
    assert second.value == pytest.approx(0.16)
    assert not second.passed
    assert found["smallest budget, share of dense accuracy"].value == pytest.approx(1 / 3, abs=1e-3)
    assert found["prompt, share of sequence"].value == pytest.approx(0.05)
    assert found["right without the work"].value == 0.05
    failed = {name for name, gate in found.items() if not gate.passed}
    assert failed == {"KV share at 90% of dense, second best", "answers cut off"}
    table = long_tables.gates_table([vars(gate) for gate in found.values()])
    assert "| answers cut off | below 0.02 | 0.03 | 0/1 |" in table


def test_outcomes_count_changes_of_more_than_two_standard_errors():
    def run(*accuracies):
        return {"evals": [{"policy": "dense", "accuracy": a, "stderr": 0.03} for a in accuracies]}

    assert judge.outcome(run(0.6, 0.53, 0.53, 0.53)) == "stalled"
    assert judge.outcome(run(0.6, 0.3, 0.6, 0.7)) == "learned"
    assert judge.outcome(run(0.6, 0.3, 0.4, 0.7)) == "fell"


def test_rank_correlation_against_the_formula_of_differences():
    ranks = [(1, 2), (2, 1), (3, 5), (4, 3), (5, 4)]
    expected = 1 - 6 * sum((a - b) ** 2 for a, b in ranks) / (5 * 24)
    assert long_tables.spearman([(a**3, 10.0 - 1 / b) for a, b in ranks]) == pytest.approx(expected)
    assert long_tables.spearman([(1, 1), (1, 2), (2, 3)]) == pytest.approx(0.75**0.5)  # a tie shares rank 1.5


def test_final_answers_are_compared_problem_by_problem():
    dense, arm = "1100" * 64, "1101" * 64
    mean, half = long_tables.paired(arm, dense)
    assert mean == 0.25
    assert half == pytest.approx(1.645 * (0.25 * 0.75 * 256 / 255) ** 0.5 / 16)
    rows = [{"arm": name, "seed": 0, "accuracy": 0.5, "length": 9, "right": right} for name, right in
            (("start", dense), ("dense", dense), ("same", dense), ("other", arm))]  # fmt: skip
    table = long_tables.finals_table(rows).splitlines()[2:]
    assert [line.split(" | ")[-1].rstrip(" |") for line in table[2:]] == [
        "+0.0 (+0.0 to +0.0), equivalent",
        "+25.0 (+20.5 to +29.5)",
    ]


def test_tokens_of_a_step_are_its_rate_times_its_time():
    assert long_tables.generated({"steps": {"speed/tokens_per_s": [10.0, 4.0], "time/rollout": [2.0, 0.5]}}) == [20, 2]


def test_arms_of_another_budget_keep_the_lines_of_the_first(tmp_path):
    path = tmp_path / "finals" / "search.jsonl"
    merge_lines(
        path, [{"arm": "rkv 64, strict", "seed": 0, "accuracy": 0.1}, {"arm": "start", "seed": 0, "accuracy": 0.2}]
    )
    merge_lines(
        path, [{"arm": "rkv 96, strict", "seed": 0, "accuracy": 0.3}, {"arm": "start", "seed": 0, "accuracy": 0.4}]
    )
    found = {row["arm"]: row["accuracy"] for row in read_lines(path)}
    assert found == {"rkv 64, strict": 0.1, "rkv 96, strict": 0.3, "start": 0.4}
    assert {arm.label for arm in long_arms.sparse_arms(SEARCH_TINY, "rkv", 64)} & set(found) == {"rkv 64, strict"}

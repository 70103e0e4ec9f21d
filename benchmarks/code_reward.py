"""The `code` reward on the reference solutions of HumanEval and MBPP: which get full reward, and programs per second.

`python benchmarks/code_reward.py DATA --out benchmarks/results/code-reward.json`

DATA holds `humaneval/test.jsonl` and `mbpp/mbpp.jsonl`, as published. Every reference solution is graded as an answer,
in a fenced block, by the same pool of workers that a run uses. Those without full reward are listed with the tests that
fail and why. Throughput is measured on the same programs, and on scripts with one standard input each. It falls
with the machine's load; the CPU time of an empty program in the sandbox does not.
"""

import argparse
import json
import os
import platform
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from alula.data import load
from alula.data.code_tests import kind_of, read_tests
from alula.rewards import Rewards, RewardTerm
from alula.rewards.code.reward import program_of, run_tests
from alula.rewards.code.sandbox import Bubblewrap, Limits

OPTIONS = {"seconds": 10.0}
SCRIPTS = 200


def references(name: str, field: str, data: str, *splits: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, answer, example) of every problem of a benchmark; `field` holds its reference solution."""
    examples = [example for split in splits for example in load(name, data_dir=data, split=split)]
    return [(f"{name} {e.fields['task_id']}", fenced(e.fields[field]), e.record()) for e in examples]


def scripts() -> list[tuple[str, str, dict[str, Any]]]:
    program = fenced("a, b = map(int, input().split())\nprint(a + b)\n")
    return [
        (str(i), program, {"tests": [{"stdin": f"{i} {i * i}\n", "stdout": f"{i + i * i}\n"}]}) for i in range(SCRIPTS)
    ]


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def measure(problems: list[tuple[str, str, dict[str, Any]]], workers: int) -> dict[str, Any]:
    with Rewards([RewardTerm(name="code", options=OPTIONS)], timeout=30, workers=workers) as rewards:
        rewards.start()
        began = time.perf_counter()
        graded = rewards.score([answer for _, answer, _ in problems], [example for *_, example in problems])
        seconds = time.perf_counter() - began
    missed = [problem for problem, value in zip(problems, graded.total) if value < 1]
    kinds = Counter(kind_of(test) for *_, example in problems for test in read_tests(example))
    return {
        "programs": len(problems),
        "full_reward": len(problems) - len(missed),
        "tests": dict(kinds),
        "not_graded": [f"{problems[i][0]}: {reason}" for i, reason in graded.failures],
        "without_full_reward": {name: reasons(answer, example) for name, answer, example in missed},
        "seconds": round(seconds, 2),
        "programs_per_second": round(len(problems) / seconds, 1),
    }


def reasons(answer: str, example: dict[str, Any]) -> list[dict[str, str]]:
    """The tests that the answer fails, each with its reason."""
    sandbox = Bubblewrap(Limits(OPTIONS["seconds"], 1 << 30))
    outcomes = run_tests(sandbox, program_of(answer), example)
    return [
        {"test": json.dumps(test), "reason": outcome.reason}
        for test, outcome in zip(read_tests(example), outcomes)
        if not outcome.passed
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="folder with humaneval/test.jsonl and mbpp/mbpp.jsonl")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sets = {
        "humaneval": references("humaneval", "canonical_solution", options.data, "test"),
        "mbpp": references("mbpp", "code", options.data, "prompt", "test", "validation", "train"),
        "scripts": scripts(),
    }
    sandbox = Bubblewrap(Limits(OPTIONS["seconds"], 1 << 30))
    report: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "load_average": round(os.getloadavg()[0], 1),
        "workers": options.workers,
        "sandbox_cpu_ms": round(1000 * fmean(sandbox.run("").seconds for _ in range(SCRIPTS)), 1),
    }
    for name, problems in sets.items():
        report[name] = measure(problems, options.workers)
    text = json.dumps(report, indent=1) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()

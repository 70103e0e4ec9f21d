"""Predictions of `alula estimate` against whole steps that were measured on one H200: a table of docs/scale-out.md.

    python benchmarks/steps.py docs/scale-out.md     # writes the table; without a file it prints it

Needs no GPU. The last rows compare with a fit to measured steps of SmolLM2-135M: rollouts 2.13 ms × longest answer +
5.2 ns × tokens held, summed over steps; scoring and updates 6.1 µs a token.
"""

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from alula.config.load import load_config
from alula.sparsity.footprint import footprint
from alula.sparsity.policy import Sparsity
from alula.trainer.step_plan import Cluster, StepPlan, StepPlanner

RESULTS = Path(__file__).with_name("results")
MARK = "<!-- steps -->", "<!-- end of steps -->"
LAYERS = {"smollm2-135m": 30}


@dataclass(frozen=True)
class Measured:
    model: str
    sparsity: str
    prompts: int
    rollouts: int
    mean: int
    most: int
    rollout_s: float
    learner_s: float
    """Scoring and updates."""
    kv_memory: str | None = None
    prompt: int = 128
    fitted: bool = False
    """From the fit, not from a step."""

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.learner_s


@cache
def predicted(row: Measured) -> StepPlan:
    settings = [
        f"model={{source: shape:{row.model}, dtype: bfloat16}}",
        f"sparsity={row.sparsity}",
        f"sampling={{prompts: {row.prompts}, n: {row.rollouts // row.prompts}, max_new_tokens: {row.most}}}",
        f"data.max_prompt_tokens={row.prompt}",
        f"engine={{max_rows: {row.rollouts}}}",
        "objective.kl=0",
        "objective.skip_scoring=false",
        "control.enabled=false",
        *([f"engine.kv_memory={row.kv_memory}"] if row.kv_memory else []),
    ]
    return StepPlanner(load_config("start", settings), Cluster("h200"), row.mean).together()


def measured() -> list[Measured]:
    """Whole steps, oldest engine last."""
    recorded = json.loads((RESULTS / "steps-h200.json").read_text())["rows"]
    steps = [
        Measured(
            row["model"],
            row["sparsity"],
            row["prompts"],
            row["rollouts"],
            row["mean_length"],
            row["most"],
            row["rollout_s"],
            row["score_s"] + row["update_s"],
            row.get("kv_memory"),
        )
        for row in recorded
    ]
    older = json.loads((RESULTS / "training-h200.json").read_text())
    for section, model, prompts, most, prompt in (
        ("check", "qwen2.5-1.5b", 32, 2048, 128),
        ("small", "smollm2-135m", 64, 256, 128),
        ("paper", "qwen2.5-1.5b", 128, 4096, 160),
    ):
        for row in older[section]["rows"]:
            policy = row["sparsity"].replace(" ", ":") + (",window=8,sinks=4" if "64+16" in row["sparsity"] else "")
            learner = row.get("strict_score_s", row["score_s"]) + row["update_s"]  # scoring is not skipped
            memory = None if section == "small" else "40GiB"
            mean = round(row["mean_length"])
            steps.append(
                Measured(model, policy, prompts, row["rollouts"], mean, most, row["rollout_s"], learner, memory, prompt)
            )
    return steps


def fitted() -> list[Measured]:
    """What the fit gives for long answers of equal length."""
    rows = []
    for rollouts, answer in ((256, 5120), (512, 5120), (512, 6144)):
        for policy in ("dense", "rkv:512+128"):
            held = footprint(Sparsity.parse(policy), 128, answer, LAYERS["smollm2-135m"]).held.sum() * rollouts
            generate, learn = 2.13e-3 * answer + 5.2e-9 * float(held), 6.1e-6 * rollouts * (128 + answer)
            rows.append(
                Measured("smollm2-135m", policy, rollouts // 8, rollouts, answer, answer, generate, learn, fitted=True)
            )
    return rows


def table() -> str:
    lines = [
        "| model | policy | rollouts | mean / most tokens | generating | error | learning | error | step | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in (*measured(), *fitted()):
        plan = predicted(row)
        policy = row.sparsity.partition(",")[0] + (", fit" if row.fitted else "")
        cells = [row.model, policy, f"{row.rollouts:,}", f"{row.mean:,} / {row.most:,}"]
        for seconds, guess in (
            (row.rollout_s, plan.rollouts),
            (row.learner_s, plan.learner),
            (row.step_s, plan.in_turn),
        ):
            cells += [f"{seconds:.1f} s", f"{100 * (guess / seconds - 1):+.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) < 2:
        print(table())
        return
    page = Path(sys.argv[1])
    before, _, rest = page.read_text().partition(MARK[0])
    page.write_text(f"{before}{MARK[0]}\n{table()}\n{MARK[1]}{rest.partition(MARK[1])[2]}")


if __name__ == "__main__":
    main()

"""The tables of docs/scale-out.md: predictions of `alula estimate` against measured steps, and what Ray costs.

    python benchmarks/steps.py docs/scale-out.md     # writes the tables; without a file it prints them

Needs no GPU. Raw rows are those of results/training-h200.json; the estimate's constants were fitted to those of the
section `long`.

Further tables compare with steps on a simulated cluster (results/cluster-steps.json), and show what workers on Ray cost
(results/ray-rollouts*.json).
"""

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from alula.config.load import load_config
from alula.trainer.step_plan import Cluster, StepPlan, StepPlanner

RESULTS = Path(__file__).with_name("results")


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
    kv_memory: str | None
    prompt: int

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


def read(name: str) -> dict:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else {}


PROMPTS = {"long": 128, "paper": 160, "check": 128, "small": 128}
"""Tokens of a prompt, by section."""


def measured() -> list[Measured]:
    """Whole steps."""
    results = read("training-h200.json")
    return [
        Measured(
            row["model"],
            row["sparsity"],
            row["prompts"],
            row["rollouts"],
            round(row["mean_length"]),
            row["most"],
            row["rollout_s"],
            row["strict_score_s"] + row["update_s"],  # scoring is not skipped
            row["kv_memory"],
            prompt,
        )
        for section, prompt in PROMPTS.items()
        for row in results[section]["rows"]
    ]


def steps_table() -> str:
    lines = [
        "| model | policy | rollouts | mean / most tokens | generating | error | learning | error | step | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in measured():
        plan = predicted(row)
        cells = [row.model, row.sparsity.partition(",")[0], f"{row.rollouts:,}", f"{row.mean:,} / {row.most:,}"]
        for seconds, guess in (
            (row.rollout_s, plan.rollouts),
            (row.learner_s, plan.learner),
            (row.step_s, plan.in_turn),
        ):
            cells += [f"{seconds:.1f} s", f"{100 * (guess / seconds - 1):+.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cluster_table() -> str:
    lines = [
        "| policy | learners + workers | `stale` | rollouts | learner | step, estimated | step, simulated | error |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in read("cluster-steps.json")["rows"]:
        cells = [row["sparsity"], f"{row['learners']} + {row['workers']}", str(row["stale"])]
        cells += [f"{row[f'{part}_s']:.1f} s" for part in ("rollouts", "learner", "estimated", "simulated")]
        lines.append(f"| {' | '.join(cells)} | {100 * (row['estimated_s'] / row['simulated_s'] - 1):+.0f} % |")
    return "\n".join(lines)


def ray_results() -> list[tuple[str, dict]]:
    """Raw results of ray_rollouts.py, each with the name of its machine."""
    found = [read("ray-rollouts.json"), read("ray-rollouts-h200.json")]
    environments = [result["environment"] for result in found if result]
    names = [next(iter(each["gpus"]), f"{each['cpus']} CPU cores").partition(",")[0] for each in environments]
    return list(zip(names, found))


def ray_steps_table() -> str:
    lines = ["| | model | | local | one worker on Ray |", "|---|---|---|---:|---:|"]
    for machine, result in ray_results():
        if len(result["steps"]) < 2:  # stopped before the run with a worker
            continue
        local, remote = result["steps"]
        model = local.get("model", "shape:tiny-llama").removeprefix("shape:")
        for name, text in (("step", "a step"), ("rollout", "its rollouts"), ("weights", "weights to the engine")):
            seconds = [f"{row[name]:.2f} s" if row[name] >= 0.005 else "–" for row in (local, remote)]
            if seconds != ["–", "–"]:
                lines.append(f"| {machine} | {model} | {text} | {' | '.join(seconds)} |")
    return "\n".join(lines)


def ray_weights_table() -> str:
    head = ("", "weights", "put into the store", "pulled and copied by a worker", "a plain copy")
    lines = [f"| {' | '.join(head)} |", "|---|---:|---:|---:|---:|"]
    for machine, result in ray_results():
        for row in result["weights"]:
            model = f", {row['weights'].removeprefix('shape:')}" if str(row["weights"]).startswith("shape:") else ""
            times = (row[name] for name in ("put_s", "take_s", "copy_s"))
            seconds = " | ".join(f"{each:.2f} s" if each >= 0.01 else f"{1e3 * each:.1f} ms" for each in times)
            lines.append(f"| {machine} | {row['bytes'] / 1e9:.2f} GB{model} | {seconds} |")
    return "\n".join(lines)


TABLES = {
    "steps": steps_table,
    "cluster": cluster_table,
    "Ray's steps": ray_steps_table,
    "Ray's weights": ray_weights_table,
}


def main() -> None:
    if len(sys.argv) < 2:
        print("\n\n".join(table() for table in TABLES.values()))
        return
    page = Path(sys.argv[1])
    for name, table in TABLES.items():
        before, _, rest = page.read_text().partition(f"<!-- {name} -->")
        after = rest.partition(f"<!-- end of {name} -->")[2]
        page.write_text(f"{before}<!-- {name} -->\n{table()}\n<!-- end of {name} -->{after}")


if __name__ == "__main__":
    main()

"""The model card of a trained model: the README.md of its folder, with the metadata that the Hugging Face hub reads."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import alula
from alula.config.run import RunConfig
from alula.files import count_text, plus_minus
from alula.run.run_dir import parse_line

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HOME = "https://github.com/alula-rl/alula"
USE = """```python
from transformers import pipeline

generate = pipeline("text-generation", model="PATH_OR_HUB_ID")
```"""
LAST = 10
"""Training metrics are means over this many steps."""


def model_card(config: RunConfig, run_dir: Path) -> str:
    """Metadata, how to load the model, how it was trained, and the run's own numbers."""
    name = Path(config.out).name
    base, data = config.model.source, config.data.source
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["alula", "reinforcement-learning", "grpo", "sparse-rollouts"],
        "base_model": base if on_hub(base) else None,
        "datasets": [data] if on_hub(data) else None,
    }
    known = yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False)
    sections = [
        f"---\n{known}---\n\n# {name}",
        f"`{public(base)}` trained by reinforcement learning on `{public(data)}` with [Alula]({HOME}) "
        f"{alula.__version__}. The rollouts were sampled under `{config.sparsity.describe()}`. The weights are the "
        "dense policy's: the model needs no sparsity to run.",
        USE,
        "## Training\n\n" + table(("setting", "value"), settings(config)),
    ]
    if results := list(evaluations(run_dir / "evals.jsonl")):
        sections.append("## Held-out evaluation\n\n" + table(("data", "policy", "step", "n", "accuracy"), results))
    if metrics := list(last_metrics(run_dir / "metrics.jsonl")):
        sections.append(f"## Last {LAST} steps\n\n" + table(("metric", "mean"), metrics))
    return "\n\n".join(sections) + "\n"


def on_hub(source: str) -> bool:
    """Whether `source` has the form of a hub id and is not a local path."""
    return bool(HUB_ID.fullmatch(source)) and not Path(source).exists()


def public(source: str) -> str:
    """`source` without the folders of this machine, since cards are published."""
    return Path(source).name if Path(source).exists() else source


def settings(config: RunConfig) -> list[tuple[str, str]]:
    objective, learner, sampling = config.objective, config.learner, config.sampling
    rows = {
        "steps": config.steps,
        "rollouts per step": f"{count_text(sampling.prompts, 'prompt')} × {sampling.n}",
        "longest answer": count_text(sampling.max_new_tokens, "token"),
        "temperature": sampling.temperature,
        "sparsity of the rollouts": config.sparsity.describe(),
        "loss": objective.loss,
        "correction": objective.correction.preset,
        "optimizer steps per step": learner.updates,
        "learning rate": learner.lr,
        "LoRA": f"rank {learner.lora.rank}" if learner.lora else None,
        "seed": config.seed,
    }
    return [(name, f"`{value}`") for name, value in rows.items() if value is not None]


def rows_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [row for line in path.read_bytes().splitlines(keepends=True) if (row := parse_line(line)) is not None]


def evaluations(path: Path) -> Iterator[tuple[str, ...]]:
    """The last evaluation of each data set under each policy."""
    last = {(row["name"], row["policy"]): row for row in rows_of(path)}
    for (name, policy), row in last.items():
        yield name, policy, str(row["step"]), str(row["n"]), f"{row['accuracy']:.1%}{plus_minus(row['stderr'])}"


def last_metrics(path: Path) -> Iterator[tuple[str, str]]:
    rows = rows_of(path)[-LAST:]
    for metric in ("reward/mean", "response/length_mean", "mismatch/veto_rate", "kv/saved"):
        values = [row[metric] for row in rows if row.get(metric) is not None]
        if values:
            yield f"`{metric}`", f"{sum(values) / len(values):.4g}"


def table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

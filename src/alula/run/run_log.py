"""What a run writes and shows: files and live line on the first rank, nothing on the others."""

import sys
from pathlib import Path
from typing import Any, TextIO

import yaml

from alula.config.load import to_yaml
from alula.config.run import RunConfig
from alula.data import Dataset
from alula.distributed import World
from alula.run.console import LiveLine
from alula.run.run_dir import MetricsWriter, State
from alula.terminal import BrokenPipeSafeStream
from alula.trainer.batch import Experience
from alula.trainer.evaluation import HeldOut
from alula.trainer.update import Learned


class Record:
    def __init__(self, config: RunConfig, world: World, stream: TextIO | None) -> None:
        self.config, self.first, self.stream = config, world.rank == 0, stream
        self.shown: Any = BrokenPipeSafeStream(stream or sys.stdout)
        self.out = Path(config.out)
        self.resumed_from: int | None = None
        self.state: State = "finished"
        self.writer: MetricsWriter | None = None
        self.live: LiveLine | None = None

    def open(self, resume_from: int | None, lines: dict[str, int] | None) -> None:
        """`resume_from` and `lines` as in `MetricsWriter`."""
        self.resumed_from = resume_from
        if not self.first:
            return
        self.writer = MetricsWriter(
            self.out,
            self.config.logging.sinks,
            resume_from=resume_from,
            lines=lines,
            settings=self.config.model_dump(mode="json"),
            total_steps=self.config.steps,
        )
        self.live = LiveLine(self.config.steps, first_step=max(resume_from or 0, 0), stream=self.shown)

    @property
    def lines(self) -> dict[str, int]:
        """How many are written, per file."""
        return dict(self.writer.lines) if self.writer else {}

    def write_settings(self) -> None:
        """config.yaml, once the run is sure to begin: a resume that is refused must not leave its settings there."""
        if not self.first:
            return
        settings = self.out / "config.yaml"
        if self.resumed_from is not None and settings.exists():
            changed = changed_settings(settings.read_text(), self.config)
            if changed:
                self.say(f"settings changed since the run began: {', '.join(changed)}.")
        settings.write_text(to_yaml(self.config))

    def introduce(self, training: Dataset, held_out: Dataset | None) -> None:
        """Say what is about to happen, in two lines."""
        c, sparsity = self.config, self.config.sparsity.build()
        preset = c.objective.correction.preset
        how = "densely" if sparsity.dense else f"under {sparsity.describe()}, correction {preset}"
        batch = f"{c.sampling.prompts} × {c.sampling.n} rollouts"
        self.say(f"{self.out}: {c.model.source}, {c.steps:,} steps of {batch} {how}.")
        left_out = "; left out: " + ", ".join(f"{n:,} ({why})" for why, n in training.dropped.items())
        evaluated = "" if held_out is None else f", {len(held_out):,} to evaluate on"
        self.say(f"{training.name}: {len(training):,} prompts{evaluated}{left_out if training.dropped else ''}.")

    def log_step(self, step: int, metrics: dict[str, float], batch: Experience, learned: Learned) -> None:
        if self.writer and self.live:
            self.writer.log(step, metrics)
            self.writer.log_completions(step, completions(batch, learned, self.config.logging.completions))
            self.live.update(step, metrics)

    def log_eval(self, step: int, name: str, policy: Any, found: HeldOut) -> None:
        if self.writer:
            self.writer.log_eval(
                step,
                name,
                policy,
                accuracy=found.accuracy,
                n=found.n,
                stderr=found.stderr,
                length=found.length,
                kv_saved=found.kv_saved,
            )
        self.say(f"step {step}: {policy} accuracy on {name} {found.accuracy:.1%} ± {found.stderr:.1%}")

    def event(self, step: int, kind: str, message: str, advice: str) -> None:
        if self.writer:
            self.writer.log_event(step, kind, message, advice)
        self.say(f"{kind}: {message} {advice}")

    def say(self, text: str) -> None:
        if self.live:
            self.live.message(text)
        elif self.first:
            print(text, file=self.shown, flush=True)

    def phase(self, name: str) -> None:
        if self.live:
            self.live.phase(name)

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.live:
            self.live.close()
        if self.writer:
            self.writer.close("failed" if kind else self.state)


def completions(batch: Experience, learned: Learned, count: int) -> list[dict[str, Any]]:
    """One rollout each of the first groups: prompts differ, and so do the answers."""
    rows = []
    for group in range(min(count, batch.groups)):
        i = group * batch.n + group % batch.n
        rollout, prompt = batch.rollouts[i], batch.examples[i].prompt
        rows.append(
            {
                "prompt": prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt),
                "completion": rollout.text,
                "reward": batch.rewards[i],
                "finish": rollout.finish,
                "vetoed": learned.vetoed[i],
            }
        )
    return rows


def changed_settings(before: str, now: RunConfig) -> list[str]:
    """Dotted names of the settings that differ between a run's config.yaml and `now`."""
    old, new = flat(yaml.safe_load(before)), flat(yaml.safe_load(to_yaml(now)))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    inner = [flat(value, f"{prefix}.{name}" if prefix else str(name)) for name, value in tree.items()]
    return {name: value for part in inner for name, value in part.items()}

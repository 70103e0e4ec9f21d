"""Run logger: writes the run folder and the live line on the first rank, and nothing on the others."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml

from alula.config.load import to_yaml
from alula.config.run import RunConfig
from alula.data import Dataset
from alula.distributed import World
from alula.errors import RunFailed, SettingError
from alula.files import count_text, plus_minus, write_atomically
from alula.run.console import LiveLine
from alula.run.environment import environment
from alula.run.run_dir import MetricsWriter, State
from alula.terminal import BrokenPipeSafeStream


def printer(world: World, stream: TextIO | None) -> Callable[[str], None]:
    """Prints lines to `stream` (by default standard output) on the first rank, before there is a logger."""
    output: Any = BrokenPipeSafeStream(stream or sys.stdout)

    def print_line(text: str) -> None:
        if world.rank == 0:
            print(text, file=output, flush=True)

    return print_line


class RunLogger:
    """Opens the run folder. `resume_from` and `lines` as in `MetricsWriter`."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        stream: TextIO | None = None,
        *,
        resume_from: int | None = None,
        lines: Mapping[str, int] | None = None,
    ) -> None:
        self.config, self.stream, self.resumed_from = config, stream, resume_from
        self.out = Path(config.out)
        self.state: State = "finished"
        """How the run ended, unless an exception ended it."""
        self.writer: MetricsWriter | None = None
        self.live: LiveLine | None = None
        if world.rank == 0:
            self.writer = MetricsWriter(
                self.out,
                config.logging.sinks,
                resume_from=resume_from,
                lines=lines,
                settings=config.model_dump(mode="json"),
                total_steps=config.steps,
            )
            output: Any = BrokenPipeSafeStream(stream or sys.stdout)
            self.live = LiveLine(config.steps, first_step=max(resume_from or 0, 0), stream=output)

    @property
    def lines(self) -> dict[str, int]:
        """Lines written so far, by file."""
        return dict(self.writer.lines) if self.writer else {}

    def start(self, training: Dataset, held_out: Sequence[Dataset]) -> None:
        """Print a summary of the run, and start writing its folder. Call it once nothing can reject the run any more: a
        rejected resume must leave the folder as it is."""
        c, sparsity = self.config, self.config.sparsity
        preset = c.objective.correction.preset
        quantised = f" with {c.engine.kv_dtype} KV" if c.engine.kv_dtype else ""
        exact = sparsity.dense and not quantised
        rollouts = "dense" if exact else f"{sparsity.describe()}{quantised}, correction {preset}"
        batch = f"{c.sampling.prompts} × {c.sampling.n} rollouts"
        self.message(f"{self.out}: {c.model.source}, {count_text(c.steps, 'step')} of {batch}, {rollouts}.")
        evaluated = f", {sum(map(len, held_out)):,} to evaluate on" if held_out else ""
        self.message(f"{training.name}: {count_text(len(training), 'prompt')}{evaluated}{left_out(training)}.")
        for dataset in held_out:
            if dataset.dropped:
                self.message(f"{dataset.name}: {len(dataset):,} to evaluate on{left_out(dataset)}.")
        if self.writer:
            self.writer.start()
            settings = self.out / "config.yaml"
            if self.resumed_from is not None and settings.exists():
                changed = changed_settings(settings.read_text(), self.config)
                if changed:
                    self.message(f"settings changed since the run began: {', '.join(changed)}.")
            write_atomically(settings, to_yaml(self.config))
            write_atomically(self.out / "environment.json", json.dumps(environment(), indent=1) + "\n")

    def log_step(self, step: int, metrics: Mapping[str, float], completions: Iterable[Mapping[str, Any]]) -> None:
        if self.writer and self.live:
            self.writer.log(step, metrics)
            self.writer.log_completions(step, completions)
            self.live.update(step, metrics)

    def log_rollouts(self, step: int, group: Mapping[str, Any]) -> None:
        if self.writer:
            self.writer.log_rollouts(step, group)

    def log_eval(self, step: int, name: str, policy: Any, result: Mapping[str, Any]) -> None:
        """`result` holds accuracy, stderr, n and further numbers."""
        if self.writer:
            self.writer.log_eval(step, name, policy, **result)
        accuracy = f"{result['accuracy']:.1%}{plus_minus(result['stderr'])}"
        self.message(f"step {step}: {policy} accuracy on {name} {accuracy}")

    def event(self, step: int, kind: str, message: str, advice: str) -> None:
        if self.writer:
            self.writer.log_event(step, kind, message, advice)
        self.message(f"{kind}: {message} {advice}")

    def message(self, text: str) -> None:
        """Print a line above the live one."""
        if self.live:
            self.live.message(text)

    def phase(self, name: str) -> None:
        """Show what the run is doing now."""
        if self.live:
            self.live.phase(name)

    def progress(self, rollouts: int, of: int, tokens: int, about: int) -> None:
        """Show how far the phase is: finished rollouts and their tokens, of about how many."""
        if self.live:
            self.live.progress(rollouts, of, tokens, about)

    def __enter__(self) -> "RunLogger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.live:
            self.live.close()
        if self.writer:
            self.writer.close("failed" if kind else self.state, None if error is None else reason(error))


def reason(error: BaseException) -> str:
    """Why a run ended, in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SettingError | RunFailed) else f"{type(error).__name__}: {text}"


def left_out(dataset: Dataset) -> str:
    """The rows that were dropped, as the end of a sentence."""
    rows = ", ".join(f"{count:,} ({why})" for why, count in dataset.dropped.items())
    return f"; left out: {rows}" if rows else ""


def changed_settings(before: str, now: RunConfig) -> list[str]:
    """Dotted names of the settings that differ between a run's config.yaml and `now`."""
    old, new = flat(yaml.safe_load(before)), flat(yaml.safe_load(to_yaml(now)))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def check_same_shape(before: Path, now: RunConfig, checkpoint: Path) -> None:
    """Raise if settings that decide what a checkpoint holds differ from a run's config.yaml."""
    if not before.exists():
        return
    shape = ("model.", "learner.lora", "distill.rank", "distill.targets", "data.source", "data.options")
    changed = [name for name in changed_settings(before.read_text(), now) if name.startswith(shape)]
    if changed:
        raise SettingError(
            f"{', '.join(changed)}: changed since the run began, so the checkpoint {checkpoint} does not fit; use the "
            f"settings in {before}, or start in another folder."
        )


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A tree of settings as one mapping of dotted names."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    branches = [flat(value, f"{prefix}.{name}" if prefix else str(name)) for name, value in tree.items()]
    return {name: value for branch in branches for name, value in branch.items()}

"""`alula calibrate --leaderboard`: compares methods at equal bytes held and at equal bytes read."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

from alula.bench.decode import rollouts as time_rollouts
from alula.engine.kv_cache import check_kv_dtype
from alula.engine.measure_queries import TEXT_PROMPTS
from alula.files import read_continued, write_atomically
from alula.mismatch.calibrate.cache import text_from_lists, text_settings, text_to_lists
from alula.mismatch.leaderboard.kv_bytes import KVBytes, fit_budget, kv_bytes
from alula.mismatch.leaderboard.row import DenseText, measure_row
from alula.mismatch.leaderboard.table import tables
from alula.run.environment import environment
from alula.sparsity.evict import METHODS as EVICTORS
from alula.sparsity.evict import needs_queries
from alula.sparsity.family import PolicyFamily, parse_families
from alula.sparsity.footprint import is_ever_sparse
from alula.sparsity.policy import DENSE, Sparsity
from alula.sparsity.select import METHODS as SELECTORS

if TYPE_CHECKING:
    from alula.cli.common import Engines
    from alula.engine.engine import Engine
    from alula.engine.rollout import Rollout
    from alula.mismatch.calibrate.calibrate import TextSettings
    from alula.models.geometry import Geometry

TABLES = ("dense", "held", "read")
LEFT_OUT = ("rkv-code",)
"""Evictors that are another one's accident."""


def default_families(target: int, page: int) -> list[PolicyFamily]:
    """All methods; evictors collect an eighth of the target before they evict."""
    evictors = [f"{name}:buffer={max(target // 8, 1)}" for name in EVICTORS if name not in LEFT_OUT]
    return parse_families(",".join([*evictors, *SELECTORS]), (page,))


@dataclass(frozen=True)
class CompareMethods:
    """The methods of --leaderboard, all if `families` is None, at the bytes of every number of tokens in `targets`."""

    families: Sequence[PolicyFamily] | None
    targets: Sequence[int]
    page: int
    statistics: Path | None
    timing: bool = True
    """Whether new rows have a time per step, on a GPU."""

    @property
    def policies(self) -> list[Sparsity]:
        """Those that were named: of all methods, one that would be dense is left out of the tables."""
        return [family.template for family in self.families or ()]

    def run(self, engines: "Engines", text: "TextSettings", out: Path, progress: bool) -> int:
        """Measure every method at every target, write after each row, print both tables. Where the engines quantise KV,
        every method is measured with KV of the model's dtype as well. Rows of earlier commands stay in the file, and in
        the tables. The dense text is kept in a work file, so that all rows stand on the same text, and `triattention`
        on statistics of its first answers. The exit code is 0."""
        dtypes = [None, engines.kv_dtype] if engines.kv_dtype else [None]
        engines.kv_dtype = None
        engine = engines.with_page(self.page)
        check_kv_dtype(dtypes[-1], engine.dtype, engine.device)
        record = open_record(out, engine, text)
        dense = DenseText.of(engine, dense_rollouts(out.with_suffix(".work.json"), engine, text, progress))
        if self.statistics or self.families is None or any(map(needs_queries, self.policies)):
            measured = [r.prompt_ids + r.token_ids for r in dense.rollouts if r.prompt_index < TEXT_PROMPTS]
            engines.measure_queries(self.statistics, lambda engine: measured)
        rows = Rows(engines, text, dense, record, out, self.timing, progress)
        for kv_dtype in dtypes:
            rows.add("dense", "dense", None, DENSE, self.page, kv_dtype)
            geometry = replace(engine.geometry, kv_dtype=kv_dtype)
            for target in self.targets:
                chosen = self.families or default_families(target, self.page)
                for table, family, policy, page in entries(geometry, self.page, chosen, target, rows.lengths, record):
                    rows.add(table, family, target, policy, page, kv_dtype)
        write_atomically(out, json.dumps(record) + "\n")
        typer.echo("\n" + tables(record) + "\n")
        for reason in record["left_out"]:
            typer.echo(reason)
        typer.echo(f"{out}: methods are ranked apart only where the paired interval of their vetoed shares excludes 0.")
        return 0


class Rows:
    """The rows of a leaderboard's record. A policy is measured once, and its row may stand in several tables."""

    def __init__(
        self,
        engines: "Engines",
        text: "TextSettings",
        dense: DenseText,
        record: dict[str, Any],
        out: Path,
        timing: bool,
        progress: bool,
    ) -> None:
        self.engines, self.text, self.dense, self.record, self.out = engines, text, dense, record, out
        self.timing, self.progress = timing, progress
        self.lengths = [(len(r.prompt_ids), len(r)) for r in dense.rollouts]
        self.known = {(row["policy"], row["kv_dtype"]): row for table in TABLES for row in record[table]}

    def add(
        self, table: str, family: str, target: int | None, policy: Sparsity, page: int, kv_dtype: str | None
    ) -> None:
        """Put a policy's row into a table, unless it is there."""
        key = (policy.describe(), kv_dtype)
        row = self.known.get(key)
        if row is None:
            row = self.known[key] = self._measure(family, target, policy, page, kv_dtype)
        there = {(other["policy"], other["kv_dtype"], other["target"]) for other in self.record[table]}
        if (*key, target) not in there:
            self.record[table].append(row | {"target": target})
            write_atomically(self.out, json.dumps(self.record) + "\n")

    def _measure(
        self, family: str, target: int | None, policy: Sparsity, page: int, kv_dtype: str | None
    ) -> dict[str, Any]:
        shown = f"{policy.describe()} in {kv_dtype}" if kv_dtype else policy.describe()
        typer.echo(f"{shown}: at the bytes of {target} tokens" if target else shown)
        self.engines.kv_dtype = kv_dtype
        engine = self.engines.with_page(page)
        step_ms = milliseconds(engine, policy, self.lengths) if self.timing else None
        row = measure_row(
            engine,
            policy,
            self.text,
            self.dense,
            family=family,
            target=target,
            step_ms=step_ms,
            progress=self.progress,
        )
        return row.to_dict()


def dense_rollouts(work_file: Path, engine: "Engine", text: "TextSettings", progress: bool) -> list["Rollout"]:
    """The dense policy's rollouts: those of the work file, or new ones."""
    settings = text_settings(engine, text)
    if work_file.exists():
        record = read_continued(work_file, "work file", settings, ("text",))
        return text_from_lists(record["text"], text.sampling)
    typer.echo(f"dense text: {len(text.prompts) * text.samples} rollouts of up to {text.length} tokens")
    rollouts = engine.generate([list(prompt) for prompt in text.prompts], text.sampling, progress=progress)
    write_atomically(work_file, json.dumps({"settings": settings, "text": text_to_lists(rollouts)}) + "\n")
    return rollouts


def entries(
    geometry: "Geometry",
    page: int,
    families: Sequence[PolicyFamily],
    target: int,
    lengths: Sequence[tuple[int, int]],
    record: dict[str, Any],
) -> Iterator[tuple[str, str, Sparsity, int]]:
    """The policies whose bytes come closest to the target's from below: peak bytes held, or mean bytes read. Table,
    family, policy and page size of each."""
    limit, longest = target * record["token_bytes"], max(map(sum, lengths))
    kinds: dict[str, Callable[[KVBytes], float]] = {"held": lambda kv: kv.peak, "read": lambda kv: kv.read}
    suffix = f" in {geometry.kv_dtype}" if geometry.kv_dtype else ""

    def left_out(name: str, reason: str) -> None:
        place = f"the table of bytes {table} at {target} tokens"
        line = f"{name}{suffix}: left out of {place}: {reason}."
        if line not in record["left_out"]:
            record["left_out"].append(line)

    for table, bytes_of in kinds.items():
        if bytes_of(kv_bytes(geometry, page, DENSE, lengths)) <= limit:  # quantised
            left_out("all methods", "all tokens fit")
            yield table, "dense", DENSE, page
            continue
        for family in families:
            if table == "held" and not family.evicts:
                continue  # a selector holds everything
            own_page = family.block or page

            def used(policy: Sparsity, page: int = own_page, bytes_of: Callable[[KVBytes], float] = bytes_of) -> float:
                return bytes_of(kv_bytes(geometry, page, policy, lengths))

            budget = fit_budget(family, limit, longest, used)
            if budget is None:
                left_out(family.describe(), "its smallest budget takes more")
            elif not any(is_ever_sparse(family.policy(budget), *length, geometry.layers) for length in lengths):
                left_out(family.describe(), "it would never be sparse")
            else:
                yield table, family.describe(), family.policy(budget), own_page


def milliseconds(engine: "Engine", policy: Sparsity, lengths: Sequence[tuple[int, int]]) -> float | None:
    """Milliseconds per decode step of as many rows as there are rollouts, all of the mean length; None on a CPU."""
    if engine.device.type != "cuda":
        return None
    prompt, generated = round(fmean(p for p, _ in lengths)), max(round(fmean(n for _, n in lengths)), 2)
    rows = min(len(lengths), engine.max_rows)
    time_rollouts(engine, rows, prompt, generated, policy)  # captures graphs
    return 1e3 * time_rollouts(engine, rows, prompt, generated, policy)["seconds"] / generated


def open_record(out: Path, engine: "Engine", text: "TextSettings") -> dict[str, Any]:
    """The file's record if it was written with the same settings, else a new one. It knows all commands that added to
    it."""
    most = text.sampling.max_new_tokens
    settings = text_settings(engine, text) | {
        "page": engine.page,
        "lengths": [max(most // 8, 1), max(most // 4, 1), max(most // 2, 1)],
    }
    if out.exists():
        record = read_continued(out, "--out", settings, ("environments", "token_bytes", *TABLES, "left_out"))
    else:
        record = {"settings": settings, "environments": [], "token_bytes": engine.geometry.kv_token_bytes}
        record |= {table: [] for table in (*TABLES, "left_out")}
    if (here := environment()) not in record["environments"]:
        record["environments"].append(here)
    return record

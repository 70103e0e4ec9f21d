"""Tables of evaluation results: one row per model and sparsity, one group of columns per data set."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from alula.evals.metrics import mean
from alula.evals.result import EvalResult
from alula.files import plus_minus

if TYPE_CHECKING:
    from rich.table import Table


def table(results: Sequence[EvalResult]) -> "Table":
    """A table for the terminal."""
    from rich.box import SIMPLE
    from rich.table import Table

    head, rows = cells(results)
    view = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for i, title in enumerate(head):
        # On a narrow terminal titles and the model's name are folded; numbers are not.
        width = max(len(row[i]) for row in rows)
        view.add_column(
            title, justify="left" if i < 2 else "right", overflow="fold", min_width=min(width, 8) if i == 0 else width
        )
    for row in rows:
        view.add_row(*row)
    return view


def markdown(results: Sequence[EvalResult]) -> str:
    head, rows = cells(results)
    rule = ["---", "---", *["---:"] * (len(head) - 2)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def cells(results: Sequence[EvalResult]) -> tuple[list[str], list[list[str]]]:
    """Head and rows. Accuracies are in percent, ± one standard error, followed by majority vote and pass@k if there are
    several samples per problem. The average over data sets is given only for rows that have all of them. Length and KV
    are averages over the row's data sets, the peak is the maximum. What was read has a column if a policy selects."""
    selecting = any(r.kv.read < 1 - r.kv.saved - 1e-6 for r in results)
    data = list(dict.fromkeys((r.data, r.k) for r in results))
    rows = []
    for model, sparsity in dict.fromkeys((r.model, r.sparsity) for r in results):
        of_row = {(r.data, r.k): r for r in results if (r.model, r.sparsity) == (model, sparsity)}
        row = [model, sparsity]
        for name, k in data:
            result = of_row.get((name, k))
            row += ["-"] * len(titles(name, k)) if result is None else accuracies(result)
        if len(data) > 1:
            complete = len(of_row) == len(data)
            row.append(f"{100 * mean([r.accuracy for r in of_row.values()]):.1f}" if complete else "-")
        row += [
            f"{mean([r.lengths.mean for r in of_row.values()]):.0f}",
            f"{100 * mean([r.kv.saved for r in of_row.values()]):.0f} %",
            *([f"{100 * mean([r.kv.read for r in of_row.values()]):.0f} %"] if selecting else []),
            str(max(r.kv.peak_tokens for r in of_row.values())),
        ]
        rows.append(row)
    average = ["average"] if len(data) > 1 else []
    head = [title for name, k in data for title in titles(name, k)]
    read = ["KV read"] if selecting else []
    return ["model", "sparsity", *head, *average, "tokens", "KV saved", *read, "peak KV"], rows


def titles(name: str, k: int) -> list[str]:
    return [f"{name} (pass@1)"] if k == 1 else [f"{name} (avg@{k})", f"maj@{k}", f"pass@{k}"]


def accuracies(result: EvalResult) -> list[str]:
    """The cells under `titles`."""
    several = (
        []
        if result.k == 1
        else ["–" if share is None else f"{100 * share:.1f}" for share in (result.maj_at_k, result.pass_at[result.k])]
    )
    return [f"{100 * result.accuracy:.1f}{plus_minus(result.error, unit='')}", *several]

"""Several results side by side: one row per model and sparsity, one column per data set."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from alula.evals.metrics import mean
from alula.evals.result import EvalResult

if TYPE_CHECKING:
    from rich.table import Table


def table(results: Sequence[EvalResult]) -> "Table":
    """For the terminal."""
    from rich.table import Table

    head, rows = cells(results)
    view = Table()
    for i, title in enumerate(head):
        view.add_column(title, justify="left" if i < 2 else "right")
    for row in rows:
        view.add_row(*row)
    return view


def markdown(results: Sequence[EvalResult]) -> str:
    head, rows = cells(results)
    rule = ["---", "---", *["---:"] * (len(head) - 2)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def cells(results: Sequence[EvalResult]) -> tuple[list[str], list[list[str]]]:
    """Head and rows. Accuracies are in percent, ± one standard error; the average is over data sets and is only
    given where a row has all of them. Length and KV are averages over the row's data sets, the peak the largest."""
    data = list(dict.fromkeys((r.data, r.k) for r in results))
    rows = []
    for model, sparsity in dict.fromkeys((r.model, r.sparsity) for r in results):
        mine = {(r.data, r.k): r for r in results if (r.model, r.sparsity) == (model, sparsity)}
        row = [model, sparsity]
        row += [accuracy(mine[d]) if d in mine else "-" for d in data]
        if len(data) > 1:
            whole = len(mine) == len(data)
            row.append(f"{100 * mean([r.accuracy for r in mine.values()]):.1f}" if whole else "-")
        found = list(mine.values())
        row += [
            f"{mean([r.lengths.mean for r in found]):.0f}",
            f"{100 * mean([r.kv.saved for r in found]):.0f} %",
            str(max(r.kv.peak_tokens for r in found)),
        ]
        rows.append(row)
    titles = [f"{name} ({'pass@1' if k == 1 else f'avg@{k}'})" for name, k in data]
    average = ["average"] if len(data) > 1 else []
    return ["model", "sparsity", *titles, *average, "tokens", "KV saved", "peak KV"], rows


def accuracy(result: EvalResult) -> str:
    error = "" if result.error is None else f" ± {100 * result.error:.1f}"
    return f"{100 * result.accuracy:.1f}{error}"

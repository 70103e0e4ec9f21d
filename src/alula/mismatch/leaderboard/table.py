"""The leaderboard as Markdown, from its file."""

from collections.abc import Sequence
from typing import Any

from alula.mismatch.leaderboard.rank import paired_difference, ranks
from alula.mismatch.leaderboard.row import Row

HEADINGS = (
    "policy",
    "rank",
    "vetoed",
    "above dense",
    "vetoed within {lengths} tokens",
    "dense text lost",
    "tail, own",
    "tail, dense text",
    "mean acceptance",
    "answer tokens",
    "KiB held: mean",
    "peak",
    "KiB read",
    "ms per step",
)
TITLES = {"held": "Equal bytes held", "read": "Equal bytes read"}


def tables(record: dict[str, Any]) -> str:
    """Both tables of a leaderboard file, one part per target."""
    settings, dense = record["settings"], [Row.from_dict(row) for row in record["dense"]]
    parts = []
    for table, title in TITLES.items():
        rows = [Row.from_dict(row) for row in record[table]]
        for target in sorted({row.target for row in rows if row.target is not None}):
            part = [row for row in rows if row.target == target]
            size = f"{target * record['token_bytes'] / 1024:,.0f} KiB, those of {target} tokens in the model's dtype"
            parts.append(f"**{title}: {size}**\n\n{table_of(part, dense, settings['samples'], settings['lengths'])}")
    return "\n\n".join(parts)


def table_of(rows: Sequence[Row], dense: Sequence[Row], samples: int, lengths: Sequence[int]) -> str:
    """Rows by their vetoed share, then the dense policy: quantised where that is larger, and as it is."""
    floor, *quantised = dense
    lines = [
        "| " + " | ".join(HEADINGS).format(lengths=" / ".join(map(str, lengths))) + " |",
        "|---|" + "---:|" * (len(HEADINGS) - 1),
    ]
    places = dict(zip(map(id, rows), ranks([row.own for row in rows], samples)))
    for row in sorted(rows, key=lambda row: (row.own.share(samples).value, -row.own.tail[0])):
        best, worst = places[id(row)]
        lines.append(line(row, floor, samples, lengths, str(best) if best == worst else f"{best}–{worst}"))
    ranked = {(row.policy, row.kv_dtype) for row in rows}
    for row in quantised:
        if (row.policy, row.kv_dtype) not in ranked:
            lines.append(line(row, floor, samples, lengths, "larger"))
    return "\n".join([*lines, line(floor, floor, samples, lengths, "floor")])


def line(row: Row, dense: Row, samples: int, lengths: Sequence[int], rank: str) -> str:
    difference, lower, upper = paired_difference(row.own, dense.own, samples)
    cells = (
        f"{row.policy}{f' in {row.kv_dtype}' if row.kv_dtype else ''}",
        rank,
        percent(row.own.share(samples)),
        f"{100 * difference:+.1f} ({100 * lower:+.1f} to {100 * upper:+.1f})" if row is not dense else "",
        " / ".join(f"{row.own.share(samples, n).value:.1%}" for n in lengths),
        percent(row.text.share(samples)),
        band(row.own.tail),
        band(row.text.tail),
        f"{sum(row.own.acceptance) / len(row.own.acceptance):.4f}",
        f"{sum(row.own.length) / len(row.own.length):.1f}",
        f"{row.kv.held / 1024:,.1f}",
        f"{row.kv.peak / 1024:,.1f}",
        f"{row.kv.read / 1024:,.1f}",
        "" if row.step_ms is None else f"{row.step_ms:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def percent(share: Any) -> str:
    lower, upper = share.interval
    return f"{share.value:.1%} ({lower:.1%} to {upper:.1%})"


def band(tail: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*tail)

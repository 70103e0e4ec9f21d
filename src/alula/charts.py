"""Line charts as standalone SVG text, for reports, planners and experiments. Needs no plotting library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from re import findall
from typing import TypedDict

WIDTH, HEIGHT = 820, 440
LEFT, RIGHT, TOP, BOTTOM = 62, 250, 40, 52
COLOURS = ("#4a80c8", "#d0583f", "#3f8f5c", "#9468cc", "#a97f1c", "#2a8f8f", "#c2588a", "#78828c", "#a06a40")
"""Each has a contrast of at least 3 on both backgrounds."""
LIGHT, DARK = "#ffffff", "#16191d"
"""Backgrounds, by the reader's colour scheme."""
STYLE = f"""
.paper {{fill: {LIGHT}}} .title {{fill: #111}} text {{fill: #333}} .grid {{stroke: #eee}}
@media (prefers-color-scheme: dark) {{
.paper {{fill: {DARK}}} .title {{fill: #f0f2f4}} text {{fill: #c3c9d0}} .grid {{stroke: #31363c}} }}
"""
DASHES = ("", "8 3", "2 3", "8 3 2 3", "14 4", "8 3 2 3 2 3", "14 4 2 4")
"""Dash patterns; from the tenth line on the colours repeat with another pattern."""
LEGEND = 28
"""Most characters in one row of the legend."""


class Look(TypedDict):
    colour: str
    dash: str


def look(index: int) -> Look:
    """Colour and dash of the curve with this index."""
    return {"colour": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}


@dataclass(frozen=True)
class Line:
    """One curve; `low` and `high`, if given, are drawn as a band. Points that are not finite leave a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: str = COLOURS[0]
    dash: str = ""
    group: str = ""
    """Lines of one group are listed under its name in the legend."""
    dots: bool = False


def chart(title: str, x_label: str, y_label: str, lines: Sequence[Line], x_names: Sequence[str] = ()) -> str:
    """An SVG line chart with a legend. `x_names` replace the numbers 0, 1, 2 … on the x axis.

    The image grows downwards if the legend needs more room than the curves.
    """
    xs = [x for line in lines for x in line.x if isfinite(x)] or [0.0, 1.0]
    ys = [y for line in lines for y in (*line.y, *line.low, *line.high) if isfinite(y)] or [0.0, 1.0]
    x_ticks = [float(i) for i in range(len(x_names))] or ticks(min(xs), max(xs))
    y_ticks = ticks(min(ys), max(ys))
    x0, x1, y0, y1 = x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    legend = _legend(lines)
    height = max(HEIGHT, TOP + 16 * len(legend) + 12)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for x in x_ticks:
        parts.append(f'<line x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="grid"/>')
        below = HEIGHT - BOTTOM + 18
        parts.append(
            f'<g transform="rotate(-25 {px(x):.1f} {below})">{_text(px(x) + 8, below, x_names[int(x)], "end")}</g>'
            if x_names
            else _text(px(x), below, f"{x:g}", "middle")
        )
    for y in y_ticks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}" class="grid"/>')
        parts.append(_text(LEFT - 8, py(y) + 4, f"{y:g}", "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, "middle"))
    parts.append(
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    for line in lines:  # bands first, so that none covers a curve
        parts += _band(line, px, py)
    for line in lines:
        parts += _curve(line, px, py)
    return "\n".join([*parts, *(part for row in legend for part in row), "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose [low, high], about six of them."""
    raw = max(high - low, 1e-6 * max(abs(high), 1.0)) / 5
    unit = 10.0 ** floor(log10(raw))
    step = min((m * unit for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def _band(line: Line, px: Callable[[float], float], py: Callable[[float], float]) -> list[str]:
    band = [(x, low, high) for x, low, high in zip(line.x, line.low, line.high) if isfinite(low) and isfinite(high)]
    edge = [f"{px(x):.1f},{py(high):.1f}" for x, _, high in band]
    edge += [f"{px(x):.1f},{py(low):.1f}" for x, low, _ in reversed(band)]
    return [f'<polygon points="{" ".join(edge)}" fill="{line.colour}" fill-opacity="0.12"/>'] if band else []


def _curve(line: Line, px: Callable[[float], float], py: Callable[[float], float]) -> list[str]:
    parts, dash = [], _dashes(line)
    pieces: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y):
        if isfinite(y):
            pieces[-1].append(f"{px(x):.1f},{py(y):.1f}")
            if line.dots:
                parts.append(f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.5" fill="{line.colour}"/>')
        else:
            pieces.append([])
    for piece in filter(None, pieces):
        parts.append(
            f'<polyline points="{" ".join(piece)}" fill="none" stroke="{line.colour}" stroke-width="1.6"{dash}/>'
        )
    return parts


def _dashes(line: Line) -> str:
    return f' stroke-dasharray="{line.dash}"' if line.dash else ""


def _legend(lines: Sequence[Line]) -> list[list[str]]:
    """Rows of 16 units each: the name of a group before its first line, then a sample of each line with its label."""
    rows: list[list[str]] = []
    left, group = WIDTH - RIGHT + 20, ""

    def write(x: float, words: str, room: int) -> None:
        for row in folded(words, room):
            rows.append([_text(x, TOP + 12 + 16 * len(rows), row, "start")])

    for line in lines:
        if line.group and line.group != group:
            write(left, line.group, LEGEND + 5)
        group, y, first = line.group, TOP + 8 + 16 * len(rows), len(rows)
        write(left + 38, line.label, LEGEND)
        stroke = f'stroke="{line.colour}" stroke-width="2"{_dashes(line)}'
        rows[first].append(f'<line x1="{left}" x2="{left + 32}" y1="{y}" y2="{y}" {stroke}/>')
    return rows


def folded(words: str, room: int) -> list[str]:
    """The text in rows of at most `room` characters, broken after a comma, a colon, an & or a space."""
    rows = [""]
    for piece in findall(r"[^ ,:&]+[ ,:&]*", words):
        if rows[-1] and len(rows[-1]) + len(piece.rstrip()) > room:
            rows.append("")
        rows[-1] += piece
    return [row.rstrip() for row in rows]


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

"""Static parts of the page: tables, bars, warnings, completions. All text is escaped here."""

from html import escape
from typing import Any

from alula.files import count_text
from alula.report.runs import Run
from alula.report.summary import COLUMNS, Cell, headline, phases
from alula.report.verdict import verdicts
from alula.run.console import seconds

COLOURS = 7
DASHES = ("", "9 4", "3 3", "9 3 2 3")


def swatch(index: int) -> str:
    """A sample of the run's line: its colour, and a dash pattern from the eighth run on."""
    dash = DASHES[index // COLOURS % len(DASHES)]
    return (
        f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><line x1="1" y1="5" x2="25" y2="5" '
        f'style="stroke:var(--run-{index % COLOURS})" stroke-dasharray="{dash}"/></svg>'
    )


def run_label(index: int, run: Run) -> str:
    return f'<span class="run">{swatch(index)}{escape(run.name)}</span>'


def headline_table(runs: list[Run]) -> str:
    table = [headline(run) for run in runs]
    shown = [column for column, cells in enumerate(zip(*table)) if any(cell != Cell() for cell in cells)]
    head = "".join(f'<th scope="col">{name}<small>{what}</small></th>' for name, what in (COLUMNS[c] for c in shown))
    rows = []
    for index, run in enumerate(runs):
        cells = "".join(
            f'<td data-name="{escape(name)}" class="{cell.tone}">{cell.value}'
            + (f"<small>{cell.detail}</small>" if cell.detail else "")
            + "</td>"
            for name, cell in ((COLUMNS[c][0], table[index][c]) for c in shown)
        )
        rows.append(f'<tr><th scope="row">{run_label(index, run)}<small>{progress(run)}</small></th>{cells}</tr>')
    return (
        f'<table class="headline"><thead><tr><th scope="col">Run</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def verdict_list(runs: list[Run]) -> str:
    items = "".join(
        f'<li class="{verdict.tone}">{run_label(index, run)} {escape(verdict.text)}</li>'
        for index, (run, verdict) in enumerate(zip(runs, verdicts(runs)))
    )
    return f'<ul class="verdicts">{items}</ul>'


def environment_table(runs: list[Run]) -> str:
    """Versions, machine, commit and command line; one column if all runs have the same."""
    known = [(index, run) for index, run in enumerate(runs) if run.environment]
    if not known:
        return '<p class="quiet">Not recorded.</p>'
    names = list(dict.fromkeys(name for _, run in known for name in run.environment))
    alike = all(run.environment == runs[0].environment for run in runs)
    known = known[:1] if alike else known
    labels = "".join(f"<th>{run_label(index, run)}</th>" for index, run in known)
    head = "" if alike else f"<tr><th></th>{labels}</tr>"
    body = "".join(
        f"<tr><th>{dotted(name)}</th>"
        + "".join(f"<td>{escape(run.environment.get(name, '—'))}</td>" for _, run in known)
        + "</tr>"
        for name in names
    )
    return f'<div class="scroll"><table class="settings">{head}{body}</table></div>'


def note_list(runs: list[Run]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for run in runs for note in run.notes)
    return f'<ul class="warnings notes">{items}</ul>' if items else ""


def progress(run: Run) -> str:
    steps = (f"{run.last_step:,} of " if run.total_steps else "") + count_text(run.total_steps or run.last_step, "step")
    if run.state == "running":  # or killed; red would alarm the reader of a live view
        return f"{steps} · <b>not finished</b>"
    return steps + (f' · <b class="state">{run.state}</b>' if run.state in ("stopped", "failed") else "")


def phase_bars(runs: list[Run]) -> str:
    timed = [(index, run, parts) for index, run in enumerate(runs) if (parts := phases(run))]
    longest = max((sum(parts.values()) for _, _, parts in timed), default=0.0)
    rows = []
    for index, run, parts in timed:
        total = sum(parts.values())
        bar = "".join(
            f'<i class="phase-{name}" style="width:{100 * value / longest:.2f}%" title="{name} {seconds(value)}"></i>'
            for name, value in parts.items()
        )
        key = "".join(
            f'<span><i class="phase-{name}"></i>{name} <b>{seconds(value)}</b> {value / total:.0%}</span>'
            for name, value in parts.items()
        )
        rows.append(
            f'<div class="phases"><div class="phases-head">{run_label(index, run)}<b>{seconds(total)}</b></div>'
            f'<div class="bar">{bar}</div><div class="key">{key}</div></div>'
        )
    return "".join(rows)


def settings_tables(runs: list[Run]) -> str:
    known = [(index, run) for index, run in enumerate(runs) if run.settings]
    names = list(dict.fromkeys(name for _, run in known for name in run.settings))
    branches = {name[:dot] for name in names for dot, letter in enumerate(name) if letter == "."}
    names = [name for name in names if name not in branches]  # `a: null` is redundant if another run has `a.b`
    if not names:
        return '<p class="quiet">No readable config.yaml in these folders.</p>'
    differing = [name for name in names if len({run.settings.get(name) for _, run in known}) > 1]
    alike = [name for name in names if name not in differing]
    parts = []
    if differing:
        head = "".join(f"<th>{run_label(index, run)}</th>" for index, run in known)
        body = "".join(
            f"<tr><th>{dotted(name)}</th>"
            + "".join(f"<td>{escape(run.settings.get(name, '—'))}</td>" for _, run in known)
            + "</tr>"
            for name in differing
        )
        parts.append(f'<div class="scroll"><table class="settings differ"><tr><th></th>{head}</tr>{body}</table></div>')
    elif len(known) > 1:
        parts.append('<p class="quiet">All settings are the same.</p>')
    if len(known) < len(runs):  # runs without settings are not compared
        missing = ", ".join(escape(run.name) for run in runs if not run.settings)
        parts.append(f'<p class="quiet">No readable config.yaml, so not compared: {missing}</p>')
    if alike:
        first = known[0][1].settings
        body = "".join(f"<tr><th>{dotted(name)}</th><td>{escape(first[name])}</td></tr>" for name in alike)
        what = f"{len(alike)} settings that all runs share" if len(known) > 1 else f"All {len(alike)} settings"
        what += f" of {escape(known[0][1].name)}" if len(known) == 1 < len(runs) else ""
        parts.append(
            f'<details><summary>{what}</summary><div class="scroll"><table class="settings">{body}</table></div>'
            "</details>"
        )
    return "".join(parts)


def dotted(name: str) -> str:
    """A setting's name with line breaks allowed after its dots."""
    return escape(name).replace(".", ".<wbr>")


def warning_list(runs: list[Run]) -> str:
    items = []
    for index, run in enumerate(runs):
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for event in run.events:
            by_kind.setdefault(str(event.get("kind", "note")), []).append(event)
        for kind, events in by_kind.items():
            again = ", ".join(f"{event['step']:,}" for event in events[1:9]) + (" …" if len(events) > 9 else "")
            items.append(
                f'<li><div class="where">{run_label(index, run)}<span>step {events[0]["step"]:,}</span>'
                f"<code>{escape(kind)}</code>" + (f"<span>again at {again}</span>" if again else "") + "</div>"
                f"<p>{escape(str(events[0].get('message', '')))}</p>"
                f'<p class="advice">{escape(str(events[0].get("advice", "")))}</p></li>'
            )
    return f'<ul class="warnings">{"".join(items)}</ul>' if items else '<p class="quiet">None.</p>'


def samples(runs: list[Run]) -> str:
    parts = []
    for index, run in enumerate(runs):
        if run.samples:
            rows = "".join(sample(row) for row in run.samples)
            opened = " open" if len(runs) == 1 else ""
            parts.append(
                f"<details{opened}><summary>{run_label(index, run)} <small>{len(run.samples)} completions</small>"
                f"</summary>{rows}</details>"
            )
    return "".join(parts) or '<p class="quiet">No completions were sampled.</p>'


def sample(row: dict[str, Any]) -> str:
    reward = row.get("reward")
    badges = [f"step {row['step']:,}"]
    if reward is not None:
        badges.append(f'<b class="{"good" if reward > 0 else "bad"}">reward {reward:.3g}</b>')
    if row.get("finish") == "length":
        badges.append('<b class="bad">truncated</b>')
    if row.get("vetoed"):
        badges.append('<b class="bad">vetoed</b>')
    opening = escape(" ".join(row["completion"].split())[:160])
    return (
        f'<details class="sample"><summary><span class="badges">{" ".join(badges)}</span>'
        f'<span class="opening">{opening}</span></summary>'
        f'<h4>Prompt</h4><pre class="prompt">{escape(row["prompt"])}</pre>'
        f"<h4>Completion</h4><pre>{escape(row['completion'])}</pre></details>"
    )

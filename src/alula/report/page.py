"""Builds the page: one HTML file that contains its style, script and data and makes no requests."""

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from string import Template

from alula.errors import SettingError, one_or_more, require
from alula.files import write_atomically
from alula.report import sections
from alula.report.charts import chart_data, clock_data
from alula.report.runs import Run, load_runs

HERE = Path(__file__).parent
LIVE_LINKS = (
    '<p class="links"><a href="rollouts">Rollouts, token by token ›</a> <span id="live" class="quiet"></span></p>'
)


def write_report(runs: Path | Sequence[Path], out: Path) -> None:
    """Write a page that compares the run folders `runs` to `out`."""
    require(not Path(out).is_dir(), f"--out {out}: is a folder; choose a file, such as {Path(out) / 'report.html'}.")
    loaded = load_runs([Path(run) for run in one_or_more(runs)])
    for run in loaded:
        for note in run.notes:
            print(f"alula: {note}", file=sys.stderr)
    page = render(loaded)
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(out), page)
    except OSError as error:
        raise SettingError(f"--out {out}: cannot be written ({error.strerror}); choose another file.") from error


def render(runs: list[Run], live: str | None = None) -> str:
    """The page. `live` is the version that the live view serves; None for a page that stands alone."""
    warnings = sum(len(run.events) for run in runs)
    return Template((HERE / "page.html").read_text()).substitute(
        title=escape(title(runs)),
        subtitle=f"Written on {datetime.now():%d %B %Y at %H:%M}".replace(" 0", " "),
        style=(HERE / "page.css").read_text(),
        script=(HERE / "page.js").read_text(),
        version="" if live is None else f' data-version="{escape(live)}"',
        connect="" if live is None else "; connect-src 'self'",
        links="" if live is None else LIVE_LINKS,
        live="" if live is None else f"<script>{(HERE / 'live.js').read_text()}</script>",
        data=embed({"runs": run_data(runs), "charts": chart_data(runs)}),
        verdicts=sections.verdict_list(runs),
        headline=sections.headline_table(runs),
        environment=sections.environment_table(runs),
        notes=sections.note_list(runs),
        phases=sections.phase_bars(runs) or '<p class="quiet">No timings were written.</p>',
        settings_title="Settings" if sum(bool(run.settings) for run in runs) < 2 else "Settings that differ",
        settings=sections.settings_tables(runs),
        warning_count=warnings or "",
        warnings=sections.warning_list(runs),
        samples=sections.samples(runs),
    )


def title(runs: list[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"


def run_data(runs: list[Run]) -> list[dict[str, object]]:
    return [
        {
            "name": run.name,
            "colour": index % sections.COLOURS,
            "dash": sections.DASHES[index // sections.COLOURS % len(sections.DASHES)],
            "clock": clock_data(run),
            "warnings": [[event["step"], str(event.get("message", ""))] for event in run.events[:50]],
        }
        for index, run in enumerate(runs)
    ]


def embed(data: object) -> str:
    """JSON that cannot close the script element that contains it, whatever its text."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")

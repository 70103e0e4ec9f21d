"""The report page: its numbers, and its rendering in a real browser without network requests."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from alula.errors import SettingError
from alula.files import size_text
from alula.report import write_report
from alula.report.page import render
from alula.report.runs import Curve, Run, load_run, names_of, read_samples
from alula.report.sections import environment_table, headline_table, settings_tables
from alula.report.series import MOST_POINTS, smooth, thin
from alula.report.summary import (
    COLUMNS,
    Cell,
    accuracy_cell,
    against_dense,
    cut_off_cell,
    headline,
    phases,
    vetoed_cell,
)
from alula.report.verdict import verdicts
from browser import attribute, browse
from report_runs import write_run

HOSTILE = "</script><script>document.documentElement.dataset.pwned = 1</script><img src=x onerror=\"pwn()\"> & 'x'"


@pytest.fixture(scope="session")
def three(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / kind, kind) for kind in ("dense", "naive", "sparse-rl")]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- in a browser


@pytest.mark.slow
def test_three_runs_are_drawn_and_no_request_is_made(chromium, three, tmp_path):
    write_report(three, tmp_path / "report.html")
    watch = (
        "const blocked = []; addEventListener('securitypolicyviolation', (e) => blocked.push(e.blockedURI));"
        "onload = () => document.documentElement.dataset.requests ="
        "performance.getEntriesByType('resource').map((e) => e.name).concat(blocked).join()"
    )
    dom = browse(chromium, tmp_path / "report.html", watch)
    assert attribute(dom, "error") is None
    assert int(attribute(dom, "drawn")) == 22
    figures = re.findall(r'<figure class="chart (\w+)"><figcaption>([^<]*)', dom)
    assert ("hero", "Reward") in figures
    assert ("hero", "Held-out accuracy · gsm8k") in figures
    assert [section for section, _ in figures].count("main") == 9
    curves = re.findall(r'<path class="curve (?:raw)?" d="(M[^"]+)"', dom)
    assert len(curves) > 40
    assert not any("NaN" in curve or "Infinity" in curve for curve in curves)
    assert "At most 1e-9 throughout (rounding), so not on a log axis: dense" in dom
    assert attribute(dom, "requests") == ""


PLAY = """
addEventListener("load", () => {
  const answers = {}, root = document.documentElement.dataset;
  const reward = document.querySelector(".plot"), curves = () => reward.querySelectorAll(".curve").length;
  const box = reward.getBoundingClientRect();
  reward.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 0.7 * box.width, clientY: box.top + 50 }));
  const tip = document.querySelector(".tip");
  answers.tip = [tip.hidden, tip.innerText];
  answers.crosses = document.querySelectorAll(".cross[visibility=visible]").length;
  reward.dispatchEvent(new PointerEvent("pointerleave"));
  answers.gone = tip.hidden;
  answers.smooth = curves();
  document.getElementById("smooth").click();
  answers.raw = curves();
  document.querySelectorAll(".legend button")[1].click();
  answers.hidden = curves();
  answers.legend = [...document.querySelectorAll(".legend button")].map((b) => [b.innerText, b.ariaPressed]);
  document.getElementById("time").click();
  answers.axis = [...reward.querySelectorAll("text")].at(-1).textContent;
  document.querySelectorAll(".legend button").forEach((b) => b.ariaPressed === "true" && b.click());
  answers.empty = reward.innerText || reward.textContent;
  root.answers = JSON.stringify(answers);
});
"""


@pytest.mark.slow
def test_read_out_switches_and_legend(chromium, three, tmp_path):
    write_report(three, tmp_path / "report.html")
    dom = browse(chromium, tmp_path / "report.html", PLAY)
    assert attribute(dom, "error") is None
    answers = json.loads(html.unescape(attribute(dom, "answers")))
    hidden, tip = answers["tip"]
    assert not hidden
    step = int(re.search(r"step (\d+)", tip).group(1))
    assert 150 < step < 180  # 0.7 of the width, less the margin of the axis, of 240 steps
    assert [name for name in ("dense", "naive", "sparse-rl") if name in tip] == ["dense", "naive", "sparse-rl"]
    assert answers["crosses"] == 22
    assert answers["gone"]
    assert (answers["smooth"], answers["raw"], answers["hidden"]) == (6, 3, 2)
    assert answers["legend"] == [["dense", "true"], ["naive", "false"], ["sparse-rl", "true"]]
    assert answers["axis"] == "minutes"
    assert answers["empty"] == "nothing to show"


def test_hostile_text_is_escaped_and_a_phone_does_not_scroll_sideways(chromium, tmp_path):
    run = write_run(tmp_path / "<img src=x onerror=pwn()>", "naive", steps=60)
    hostile = {"step": 60, "prompt": HOSTILE, "completion": HOSTILE, "reward": 0.0, "finish": "stop", "vetoed": True}
    for name, row in (
        ("completions.jsonl", hostile),
        ("events.jsonl", {"step": 60, "kind": HOSTILE, "message": HOSTILE, "advice": HOSTILE}),
        ("evals.jsonl", {"step": 60, "name": HOSTILE, "policy": "dense", "accuracy": 0.5, "stderr": 0.1}),
    ):
        with (run / name).open("a") as file:
            file.write(json.dumps(row) + "\n")
    (run / "config.yaml").write_text(json.dumps({HOSTILE: HOSTILE * 5}))
    write_report([run], tmp_path / "inner.html")
    inner = tmp_path / "inner.html"
    tell = (
        "onload = () => { document.querySelectorAll('details').forEach((d) => d.open = true);"
        "const root = document.documentElement;"
        "parent.postMessage([root.scrollWidth, root.dataset.pwned, document.images.length, root.dataset.error,"
        "document.querySelector('.sample:last-of-type pre').textContent], '*') }"
    )
    inner.write_text(inner.read_text().replace("</body>", f"<script>{tell}</script></body>"))
    outer = tmp_path / "outer.html"
    outer.write_text(
        "<!doctype html><body><script>onmessage = (e) => document.documentElement.dataset.got = JSON.stringify(e.data)"
        '</script><iframe src="inner.html" style="width:400px;height:3000px;border:0"></iframe></body>'
    )
    width, pwned, images, error, text = json.loads(html.unescape(attribute(browse(chromium, outer), "got")))
    assert (pwned, images, error) == (None, 0, None)
    assert text == HOSTILE
    assert width == 400


@pytest.mark.slow
def test_ten_runs_with_missing_metrics_an_unfinished_and_a_new_run(chromium, tmp_path):
    runs = [write_run(tmp_path / f"run-{index}", "sparse-rl", steps=30, seed=index) for index in range(7)]
    going = write_run(tmp_path / "going", "naive", steps=45, close=False)
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"step": 46, "reward/mean": 0.')
    bare, begun = tmp_path / "bare", tmp_path / "begun"
    write_lines(bare / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5, "odd": "text", "policy/entropy": None}])
    write_lines(begun / "metrics.jsonl", [])
    write_report([*runs, going, bare, begun], tmp_path / "report.html")
    dom = browse(chromium, tmp_path / "report.html", "document.getElementById('time').click()")
    assert attribute(dom, "error") is None
    assert "10 runs compared" in dom
    assert "45 of 240 steps · <b" in dom
    assert "not finished" in dom
    assert "0 steps" in dom
    assert 'stroke-dasharray="9 4"' in dom  # the eighth run has the first one's colour and a dash


MEASURE = """
addEventListener("load", () => {
  const figure = [...document.querySelectorAll("figure")].find((f) => f.innerText.startsWith("Held-out"));
  const at = (line, end) => Number(line.getAttribute(end));
  const ends = [...figure.querySelectorAll(".error")].map((bar) => [at(bar, "y1"), at(bar, "y2")]);
  const bottom = at(figure.querySelector(".axis"), "y1");
  const lines = [...document.querySelectorAll("figure")].find((f) => f.innerText.startsWith("Consistency"))
    .querySelectorAll(".grid").length;
  const progress = [...document.querySelectorAll(".headline tbody th small")].map((small) => small.offsetHeight);
  document.documentElement.dataset.seen = JSON.stringify([ends, bottom, lines, progress]);
});
"""


def test_error_bars_stay_in_their_chart_log_axes_have_a_scale_and_progress_one_line(chromium, tmp_path):
    write_lines(tmp_path / "run" / "metrics.jsonl", [{"step": step, "mismatch/xi_p01": 0.3 * step} for step in (1, 2)])
    evals = {"name": "held", "policy": "dense"}
    accuracies = [(0, 0.01, 0.03), (1, 0.1, 0.02), (2, 0.172, 0.048)]
    rows = [evals | {"step": step, "accuracy": mean, "stderr": error} for step, mean, error in accuracies]
    write_lines(tmp_path / "run" / "evals.jsonl", rows)
    other = write_run(tmp_path / "a", "sparse-rl", steps=24)
    write_report([tmp_path / "run", other], tmp_path / "report.html")
    page = tmp_path / "report.html"
    page.write_text(page.read_text().replace('id="more-box" hidden', 'id="more-box" open'))
    dom = browse(chromium, page, MEASURE)
    assert attribute(dom, "error") is None
    bars, bottom, lines, progress = json.loads(html.unescape(attribute(dom, "seen")))
    assert len(bars) == 3
    assert all(8 <= top < low <= bottom for low, top in bars)  # 8: the picture's upper margin
    assert bars[0][0] == bottom  # an accuracy is not below zero, however large its error
    assert bars[2][1] < 30  # and the axis ends close above the highest bar
    assert lines > 1
    assert max(progress) < 20


# ---- without a browser


def test_the_page_is_self_contained(three, tmp_path):
    write_report(three, tmp_path / "out" / "report.html")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    page = (tmp_path / "out" / "report.html").read_text()
    loads: list[str] = []

    class Loads(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            loads.extend(value or "" for name, value in attributes if name in ("src", "href", "srcset", "data"))

    Loads().feed(page)
    assert loads == ["data:,"]
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|url\(|@import|\bfetch\(|XMLHttpRequest|import\(", page)


def test_differing_settings_are_listed_separately(three):
    table, shared = settings_tables([load_run(path, path.name) for path in three]).split("<details>")
    rows = re.findall(
        r"<tr><th>([\w.]+)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", table.replace("<wbr>", "")
    )
    assert rows == [
        ("correction", "none", "none", "sparse-rl"),
        ("sparsity.evict.method", "—", "rkv", "rkv"),
        ("sparsity.evict.budget", "—", "64", "64"),
        ("sparsity.evict.buffer", "—", "16", "16"),
    ]
    assert "6 settings that all runs share" in shared


def test_headline_numbers(three):
    run = load_run(three[2], "sparse-rl")
    rows = [json.loads(line) for line in (three[2] / "metrics.jsonl").read_text().splitlines()]
    evals = [json.loads(line) for line in (three[2] / "evals.jsonl").read_text().splitlines()]
    dense = [row["accuracy"] for row in evals if row["policy"] == "dense"]
    cells = [cell.value for cell in headline(run)]
    assert cells[0] == f"{sum(row['reward/mean'] for row in rows[-10:]) / 10:.3f}"
    assert cells[1] == f"{dense[0]:.1%} → {dense[-1]:.1%}"
    named = dict(zip((name for name, _ in COLUMNS), cells))
    assert named["Vetoed"] == f"{sum(row['mismatch/veto_rate'] for row in rows) / len(rows):.1%}"
    assert named["KV saved"] == f"{sum(row['kv/saved'] for row in rows) / len(rows):.0%}"
    assert named["Cut off"] == f"{sum(row['response/truncated'] for row in rows[-10:]) / 10:.1%}"
    assert named["Peak KV"] == size_text(max(row["kv/bytes_peak"] for row in rows))
    assert against_dense(-(1 << 20), 0.3) == "1.0 MiB more than the same answers densely"
    assert against_dense(1 << 31, 0.3) == "2.00 GiB less than the same answers densely"
    assert against_dense(1 << 20, 0.0) == against_dense(None, 0.3) == ""
    assert cut_off_cell(0.3) == Cell("30.0%", "above 20%", "bad")
    assert vetoed_cell(0.2, 0.0) == Cell("20.0%", "above 15%, 0.0% rejected", "bad")
    assert vetoed_cell(0.0, 1.0) == Cell("0.0%", "above 15%, 100.0% rejected", "bad")
    assert vetoed_cell(0.05, None) == Cell("5.0%")
    parts = phases(run)
    assert list(parts) == ["rollout", "reward", "score", "update", "other"]
    assert sum(parts.values()) == pytest.approx(sum(row["time/step"] for row in rows) / len(rows))


def test_columns_without_a_number_are_left_out(three):
    dense, sparse = (load_run(three[i], str(i)) for i in (0, 2))
    assert "Held-out, sparse" in headline_table([dense, sparse])
    table = headline_table([dense])
    assert "Held-out, sparse" not in table
    assert table.count("<td") == table.count('<th scope="col">') - 1, "without the column of names"


def test_every_run_has_a_verdict_and_sparse_ones_are_compared(three):
    dense, naive, corrected = verdicts([load_run(path, path.name) for path in three])
    assert re.fullmatch(
        r"Held-out accuracy of the dense policy rose from 2\d\.\d% to 5\d\.\d% \(\+\d+\.\d ± \d\.\d points\)\.",
        dense.text,
    )
    assert (dense.tone, naive.tone, corrected.tone) == ("good", "bad", "good")
    assert re.search(r" fell from .* of the KV saved, .* of rollouts vetoed; .* points below dense\.$", naive.text)
    assert re.search(r" rose from .* of the KV saved, .*; level with dense \(", corrected.text)
    assert "level with" not in verdicts([load_run(three[2], "alone")])[0].text
    assert verdicts([Run("empty", Path())])[0].text.startswith("No held-out evaluation")
    page = render([load_run(path, path.name) for path in three])
    assert page.index('class="verdicts"') < page.index('class="headline"')
    assert all(one.text.split(";")[0] in page for one in (dense, naive, corrected))


def test_the_page_shows_where_the_runs_ran(three, tmp_path):
    runs = [load_run(path, path.name) for path in three]
    assert "Not recorded." in environment_table(runs)
    for path in three:
        (path / "environment.json").write_text(json.dumps({"alula": "1.2", "gpus": ["<H200>"], "threads": 1}))
    alike = environment_table([load_run(path, path.name) for path in three])
    assert alike.count("<td>") == 3, "one column"
    assert "&lt;H200&gt;" in alike
    (three[1] / "environment.json").write_text(json.dumps({"alula": "1.3"}))
    differing = environment_table([load_run(path, path.name) for path in three])
    assert differing.count("<td>") == 9
    assert "1.3" in differing
    for path in three:
        (path / "environment.json").unlink()


@pytest.mark.slow
def test_rounding_does_not_stretch_the_axis_of_the_mismatch(chromium, three, tmp_path):
    """A dense run on the CPU has a KL of about 1e-15."""
    folder = tmp_path / "rounding"
    folder.mkdir()
    lines = [json.dumps({"step": step, "mismatch/kl_k3": 1e-15 * step, "reward/mean": 0.5}) for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = tmp_path / "page.html"
    write_report([folder, three[2]], page)
    dom = browse(chromium, page)
    chart = re.search(r"Mismatch KL.*?</figure>", dom, re.DOTALL)[0]
    assert "At most 1e-9 throughout (rounding), so not on a log axis: rounding" in chart
    assert "1e-15" not in chart
    assert len(re.findall(r'<path class="curve (?:raw)?"', chart)) == 2, "the other run, smooth and raw"


def test_a_change_is_marked_only_if_significant():
    assert accuracy_cell([(0.40, 0.02), (0.43, 0.02)]).tone == ""
    assert accuracy_cell([(0.40, 0.02), (0.50, 0.02)]).tone == "good"
    assert accuracy_cell([(0.40, 0.02), (0.30, 0.02)]).tone == "bad"
    assert accuracy_cell([(0.80, 0.03), (1.00, 0.00)]).detail == "▲ 20.0 ± 3.0 points", "the error of the difference"
    assert accuracy_cell([(0.2, 0.0), (0.5, 0.0), (0.4, 0.0)]).detail == "▲ 20.0 points, best 50.0%", "no error of 0"
    assert accuracy_cell([(1.0, 0.0)]) == Cell("100.0%")
    assert accuracy_cell([(0.4, 0.02)]) == Cell("40.0%", "± 2.0%")


def test_thinning_keeps_spikes_ends_and_order():
    values = np.random.default_rng(0).normal(size=100_000)
    values[[123, 77_777]] = [50, -60]
    curve = Curve(np.arange(1, 100_001), values)
    small = thin(curve)
    assert MOST_POINTS * 0.9 < len(small.steps) <= MOST_POINTS
    assert (np.diff(small.steps) > 0).all()
    assert (small.steps[0], small.steps[-1]) == (1, 100_000)
    assert {124, 77_778} <= set(small.steps.tolist())
    assert small.values.tolist() == [values[step - 1] for step in small.steps]
    assert thin(Curve(curve.steps[:500], values[:500])).steps.tolist() == list(range(1, 501))


def test_smoothing_is_the_debiased_exponential_mean():
    values = np.random.default_rng(1).normal(size=80)
    curve = smooth(Curve(np.arange(80), values))
    keep = 1 - 2 / (80 / 20 + 1)
    for index in (0, 1, 40, 79):
        weights = np.array([keep ** (index - earlier) for earlier in range(index + 1)])
        assert curve.values[index] == pytest.approx((weights * values[: index + 1]).sum() / weights.sum())
    assert len(smooth(Curve(np.arange(9000), np.ones(9000))).steps) <= MOST_POINTS // 2


def test_a_huge_run_makes_a_small_page(tmp_path):
    rows = [
        {"step": step, "reward/mean": step % 7 / 7, "policy/entropy": 0.3, "time/step": 1.0} for step in range(20_000)
    ]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    completions = [
        {"step": step // 4, "prompt": "p", "completion": "long " * 500, "reward": step % 2} for step in range(8000)
    ]
    write_lines(tmp_path / "run" / "completions.jsonl", completions)
    write_report([tmp_path / "run"], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 400_000


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 9, 40, 1000])
def test_completions_are_spread_over_the_run_and_varied(tmp_path, steps):
    rows = [
        {"step": step, "prompt": "p", "completion": str(index), "reward": float(index == 7), "finish": "stop"}
        for step in range(steps)
        for index in range(8)
    ]
    write_lines(tmp_path / "completions.jsonl", rows)
    samples = read_samples(tmp_path / "completions.jsonl", [])
    chosen = sorted({row["step"] for row in samples})
    assert (chosen[0], chosen[-1]) == (0, steps - 1)
    assert min(steps, 5) <= len(chosen) <= 9
    assert max(np.diff(chosen), default=0) <= max(1, steps / 4)
    for step in chosen:
        here = [row["completion"] for row in samples if row["step"] == step]
        assert here == ["0", "1", "2", "7"]


def test_long_completions_lose_their_middle(tmp_path):
    write_lines(tmp_path / "completions.jsonl", [{"step": 1, "prompt": "p", "completion": "a" * 9000 + "END"}])
    (row,) = read_samples(tmp_path / "completions.jsonl", [])
    assert len(row["completion"]) < 6100
    assert row["completion"].endswith("END")
    assert "3,003 characters left out" in row["completion"]


def test_names_are_folders_and_as_many_parents_as_needed():
    assert names_of([Path("/a/one"), Path("/a/two")]) == ["one", "two"]
    assert names_of([Path("/a/x/run"), Path("/a/y/run"), Path("/b")]) == ["x/run", "y/run", "b"]
    assert names_of([Path("/a/x/run"), Path("/b/x/run")]) == ["a/x/run", "b/x/run"]


def test_a_folder_without_a_run_raises(tmp_path):
    with pytest.raises(SettingError, match=r"no metrics\.jsonl"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(SettingError, match="nothing: does not exist"):
        write_report(tmp_path / "nothing", tmp_path / "report.html")
    with pytest.raises(SettingError, match="at least one run"):
        write_report([], tmp_path / "report.html")


def test_broken_lines_are_counted_except_a_truncated_last_line(tmp_path, capsys):
    complete = write_run(tmp_path / "complete", "dense", steps=20)
    cut = shutil.copytree(complete, tmp_path / "cut")
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 21, "reward/mean": 0.')
    write_report([complete, cut], tmp_path / "report.html")
    assert capsys.readouterr().err == ""
    assert 'class="warnings notes"' not in (tmp_path / "report.html").read_text()

    broken = shutil.copytree(complete, tmp_path / "<b>broken")
    lines = (complete / "metrics.jsonl").read_text().splitlines()
    lines[2], lines[7], lines[9] = '{"step": 3, "rew', "[1]", '{"reward/mean": 0.5}'
    (broken / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (broken / "evals.jsonl").write_text("nonsense\n")
    write_report([complete, broken], tmp_path / "report.html")
    printed = capsys.readouterr().err
    page = (tmp_path / "report.html").read_text()
    for name, count in (
        ("metrics.jsonl", "3 of 20 lines could not be read (first: line 3"),
        ("evals.jsonl", "1 of 1"),
    ):
        assert f"alula: {broken / name}: {count}" in printed
        assert f"<li>{html.escape(str(broken / name))}: {count}" in page
    assert len(printed.splitlines()) == 2
    assert len(load_run(broken, "broken").curves["reward/mean"].steps) == 17


def test_the_page_says_why_a_run_failed(tmp_path, capsys):
    run = write_run(tmp_path / "run", "dense", steps=5)
    (run / "status.json").write_text('{"state": "failed", "total_steps": 9, "reason": "the reward <r> failed"}')
    write_report([run], tmp_path / "report.html")
    assert f"<li>{run}: the run failed: the reward &lt;r&gt; failed</li>" in (tmp_path / "report.html").read_text()
    assert f"alula: {run}: the run failed: the reward <r> failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"seed: 1\nmodel: {source: [\n x: }\n", "line 3 could not be read"),
        (b"seed: \xff\xfe\n", "it could not be read"),
        (b"just words\n", "it is not a mapping"),
    ],
)
def test_broken_settings_and_status_are_left_out(tmp_path, capsys, text, fault):
    runs = [write_run(tmp_path / name, "dense", steps=5) for name in ("broken", "complete")]
    for name in ("config.yaml", "status.json"):
        (runs[0] / name).write_bytes(text)
    write_report(runs, tmp_path / "report.html")
    printed = capsys.readouterr().err.splitlines()
    page = (tmp_path / "report.html").read_text()
    assert [line.partition(", so")[0] for line in printed] == [
        f"alula: {runs[0] / name}: {fault}" for name in ("status.json", "config.yaml")
    ]
    assert page.count(f": {fault}, so the page does not show") == 2
    assert "<h2>Settings</h2>" in page
    assert "so not compared: broken</p><details><summary>All 8 settings of complete</summary>" in page
    assert load_run(runs[0], "broken").settings == {}
    write_report(runs[:1], tmp_path / "report.html")
    assert "No readable config.yaml in these folders." in (tmp_path / "report.html").read_text()


def test_duration_of_a_run_shorter_than_a_second(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "time/step": 0.2} for step in (1, 2)])
    assert headline(load_run(tmp_path, "short"))[-1].value == "0.4 s"


def test_an_empty_run_has_a_headline():
    assert {cell.value for cell in headline(Run("empty", Path()))} == {"—"}


def test_the_command_writes_the_page_without_torch(three, tmp_path):
    script = (
        "import sys, typer\nfrom alula.cli.report import report\napp = typer.Typer()\napp.command()(report)\n"
        "try: app()\nfinally: assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", script, *map(str, three), "-o", str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("3 runs")
    assert (tmp_path / "page.html").stat().st_size > 100_000


def test_a_folder_as_output_raises(three, tmp_path):
    with pytest.raises(SettingError, match=r"--out .*: is a folder"):
        write_report(three, tmp_path)
    assert not list(tmp_path.parent.glob("*.tmp"))

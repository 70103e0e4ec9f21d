"""The live view: served on this machine only, updating by itself, with a rollout browser."""

import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

import alula.report.watch as live
from alula.errors import SettingError
from alula.report.rollouts import nearest, recorded_steps, token_html
from browser import attribute, visit

HOSTILE = "</script><script>document.documentElement.dataset.pwned = 1</script><img src=x onerror=\"pwn()\"> & 'x'"
REACHABLE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def append(path: Path, row: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def group(step: int) -> dict:
    rollout = {
        "tokens": ["so", HOSTILE, "\n", "bad"],
        "log_ratio": [0.0, -3.0, None, math.log(2.5e-5)],
        "evicted": "0905" + "0300",
        "reward": 1.0,
        "advantage": -0.5,
        "finish": "length",
        "vetoed": True,
        "rejected": True,
        "rerolled": False,
    }
    other = rollout | {"tokens": ["fine"], "log_ratio": [0.1], "evicted": None, "vetoed": False}
    return {
        "step": step,
        "sparsity": HOSTILE,
        "veto": 1e-4,
        "prompt": ["a", "b", "c", "?"],
        "rollouts": [rollout, other],
    }


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "<img src=x onerror=pwn()>"
    folder.mkdir()
    append(folder / "metrics.jsonl", {"step": 1, "reward/mean": 0.25})
    append(folder / "completions.jsonl", {"step": 1, "prompt": HOSTILE, "completion": HOSTILE, "reward": 0.0})
    append(folder / "rollouts.jsonl", group(1))
    append(folder / "rollouts.jsonl", group(11))
    return folder


@contextmanager
def serving(*runs: Path) -> Iterator[int]:
    server = live.open_server(list(runs), 0)
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def get(port: int, path: str, host: str = "localhost") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.slow
def test_the_page_updates_by_itself(chromium, run, monkeypatch):
    polls: list[str] = []
    version = live.version

    def writing_version(runs: list[Path]) -> str:
        polls.append("asked")
        if len(polls) == 3:  # the page has been loaded and has asked once: the run goes on
            append(run / "metrics.jsonl", {"step": 2, "reward/mean": 0.75})
            append(run / "evals.jsonl", {"step": 2, "name": "held", "policy": "dense", "accuracy": 0.5, "stderr": 0.1})
            (run / "status.json").write_text('{"state": "running", "total_steps": 7}')
        return version(runs)

    monkeypatch.setattr(live, "version", writing_version)
    with serving(run) as port:
        dom = visit(chromium, f"http://127.0.0.1:{port}/", REACHABLE, "--virtual-time-budget=9000")
    assert (attribute(dom, "error"), attribute(dom, "pwned")) == (None, None)
    assert attribute(dom, "updates") == "1"
    assert "2 of 7 steps" in dom
    assert "Held-out accuracy · held" in dom
    assert len(re.findall(r'<figure class="chart hero">', dom)) == 2
    assert re.search(r'<span id="live" class="good">live</span>', dom)
    assert "<img" not in dom


@pytest.mark.slow
def test_rollouts_are_shown_token_by_token(chromium, run):
    with serving(run) as port:
        dom = visit(chromium, f"http://127.0.0.1:{port}/rollouts", REACHABLE)
    assert (attribute(dom, "error"), attribute(dom, "pwned")) == (None, None)
    assert "<img" not in dom
    assert "step 11" in dom
    first, second = re.findall(r'<pre class="answer">(.*?)</pre>', dom, re.DOTALL)
    assert re.search(r'<i class="veto" title="ξ 2.5e-05">bad<sup>2.5e-05</sup></i>', first)
    assert re.search(r'<i class="e3 low" title="ξ 0.05 · evicted in 33% of the heads">&lt;/script&gt;', first)
    assert '<i class="given" title="given, not sampled">↵' in first
    assert "veto" not in second
    kept = re.search(r"<summary>Prompt, as it was kept</summary><pre>(.*?)</pre>", dom)[1]
    assert re.sub(r"<[^>]*>", "", kept) == "abc?"
    assert '<i class="e9" title="evicted in 100% of the heads">b</i>' in kept
    assert "No evictions were recorded" in dom


def test_steps_can_be_chosen_and_the_last_one_follows_the_run(run):
    with serving(run) as port:
        status, first = get(port, "/rollouts?run=0&step=3")
        assert status == 200
        assert "<b>step 1</b> <small>1 of 2 recorded</small>" in first
        append(run / "rollouts.jsonl", group(21))
        with (run / "rollouts.jsonl").open("a") as file:
            file.write('{"step": 31, "prompt": ["cut')
        assert "<b>step 21</b> <small>3 of 3 recorded</small>" in get(port, "/rollouts?run=7")[1]
        assert "<b>step 11</b>" in get(port, "/rollouts?run=x&step=12")[1]
        (run / "rollouts.jsonl").unlink()
        assert "logging.rollouts" in get(port, "/rollouts")[1]


def test_only_this_machine_is_answered(run, tmp_path):
    with serving(run) as port:
        assert get(port, "/", host="127.0.0.1")[0] == 200
        assert get(port, "/", host="evil.example")[0] == 403
        assert get(port, "/config.yaml")[0] == 404
        assert get(port, "/../metrics.jsonl")[0] == 404
        with pytest.raises(SettingError, match=f"--port {port}"):
            live.open_server([run], port)
    with pytest.raises(SettingError, match="nothing"):
        live.open_server([tmp_path / "nothing"], 0)


def test_the_version_changes_when_a_run_writes(run):
    before = live.version([run])
    assert live.version([run]) == before
    append(run / "events.jsonl", {"step": 1, "kind": "note"})
    assert live.version([run]) != before


def test_helpers(tmp_path):
    assert recorded_steps(tmp_path / "none.jsonl") == []
    assert nearest([], 3) is None
    assert nearest([1, 11, 21], None) == 2
    assert nearest([1, 11, 21], 14) == 1
    assert token_html("a", "0", None, 1e-4) == "<i>a</i>"
    assert token_html("\n", "0", -0.01, 1e-4) == '<i title="ξ 0.99">↵\n</i>'

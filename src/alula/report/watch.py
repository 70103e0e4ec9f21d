"""The live view: serves the report's page and the rollout browser on this machine only, while runs go on."""

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from alula.errors import SettingError, require
from alula.report.page import render
from alula.report.rollouts import render_rollouts
from alula.report.runs import Run, load_runs, names_of

LOCAL = "127.0.0.1"
HOSTS = {LOCAL, "localhost"}
"""Names by which a browser on this machine, or behind an ssh tunnel to it, addresses the server."""


def open_server(runs: list[Path], port: int) -> ThreadingHTTPServer:
    """A server of the live view of the run folders `runs`; call its `serve_forever`. Port 0 takes a free one."""
    for run in runs:
        require(
            (run / "metrics.jsonl").is_file(),
            f"run folder {run}: contains no metrics.jsonl; name a folder that `alula train` wrote, or wait a few "
            "seconds if the run has just been started.",
        )
    try:
        return ThreadingHTTPServer((LOCAL, port), partial(Handler, runs))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingError(f"--port {port}: cannot be used ({why}); choose another, or 0 for a free one.") from None


class Handler(BaseHTTPRequestHandler):
    """Answers GET requests: `/`, `/rollouts?run=0&step=11`, and `/version`, which changes when a run writes."""

    def __init__(self, runs: list[Path], *arguments: object) -> None:
        self.runs = runs
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host not in HOSTS:  # a page of another site whose name was pointed here
            return self.answer(HTTPStatus.FORBIDDEN, "text/plain", "This server answers to localhost only.")
        address = urlsplit(self.path)
        pages: dict[str, tuple[str, Callable[[], str]]] = {
            "/": ("text/html", self.curves),
            "/rollouts": ("text/html", partial(self.rollouts, parse_qs(address.query))),
            "/version": ("text/plain", lambda: version(self.runs)),
        }
        if address.path not in pages:
            return self.answer(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page.")
        kind, page = pages[address.path]
        try:
            self.answer(HTTPStatus.OK, kind, page())
        except SettingError as error:  # a run folder was removed
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", str(error))

    def curves(self) -> str:
        now = version(self.runs)
        return render(load_runs(self.runs), live=now)

    def rollouts(self, query: dict[str, list[str]]) -> str:
        def number(name: str) -> int | None:
            text = query.get(name, [""])[0]
            return int(text) if text.isdecimal() else None

        runs = [Run(name, path) for path, name in zip(self.runs, names_of(self.runs))]  # their curves are not needed
        return render_rollouts(runs, number("run") or 0, number("step"), version(self.runs))

    def answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a line per poll would bury the terminal."""


def version(runs: list[Path]) -> str:
    """A text that changes whenever a file at the top of a run folder does."""
    files = sorted(path for run in runs for path in run.glob("*.*") if path.is_file())
    state = [(str(path), stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]]
    return sha256(repr(state).encode()).hexdigest()[:16]

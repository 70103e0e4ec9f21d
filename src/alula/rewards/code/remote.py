"""Runs programs on a SandboxFusion server (or one with its HTTP interface) instead of this machine."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import Any

from alula.errors import SettingError, require
from alula.rewards.code.sandbox import OUTPUT_BYTES, Limits, Run, SandboxError

ATTEMPTS = 3
PAUSE = 0.5
"""Seconds before the second attempt; twice as long before the next."""
OVERHEAD = 5.0
"""Seconds beyond the program's own time that a reply may take."""


class SandboxFusion:
    """`POST <url>/run_code`. The isolation is that of the server. Building one runs a first program."""

    def __init__(self, url: str, limits: Limits) -> None:
        parts = urllib.parse.urlsplit(url)
        require(
            parts.scheme in ("http", "https") and bool(parts.netloc),
            f"reward code: url={url!r} is not an http address; give one such as http://localhost:8080.",
        )
        self.url = url if parts.path.strip("/") else f"{url.rstrip('/')}/run_code"
        self.limits = limits
        try:
            run = self.run("print(6 * 7)")
        except SandboxError as error:
            raise SettingError(
                f"reward code: the sandbox server at {self.url} does not work ({error}). Start it, correct the option "
                "url, or leave url out to use bubblewrap on this machine."
            ) from error
        require(
            run.output.strip() == b"42",
            f"reward code: the server at {self.url} did not run a test program ({run.ended}); check its Python.",
        )

    def run(self, program: str, stdin: str = "", wall_seconds: float | None = None) -> Run:
        """Run the program as a script. Server errors and lost connections are tried again; then `SandboxError`."""
        body = {
            "code": program,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": self.limits.seconds,
            "run_timeout": self.limits.seconds,
            "memory_limit_MB": self.limits.memory >> 20,
        }
        limit = (wall_seconds or self.limits.wall_seconds) + OVERHEAD
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                return read_reply(self._post(body, limit))
            except urllib.error.HTTPError as error:
                problem = f"HTTP status {error.code}"
                if error.code < 500:
                    break
            except (OSError, HTTPException, ServerFault) as error:  # a timeout is an OSError
                problem = f"{type(error).__name__}: {error}"
        raise SandboxError(problem)

    def _post(self, body: dict[str, Any], limit: float) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=limit) as reply:
            return bytes(reply.read(4 * OUTPUT_BYTES))


class ServerFault(Exception):
    """The server could not run the program; another attempt may succeed."""


def read_reply(text: bytes) -> Run:
    """What a reply says about the program. A reply that is not SandboxFusion's raises `SandboxError` at once."""
    try:
        reply = json.loads(text)
        status, result = reply["status"], reply.get("run_result")
        if status == "SandboxError":
            raise ServerFault(str(reply.get("message"))[:200])
        ended = "time" if result["status"] == "TimeLimitExceeded" else f"exit code {int(result['return_code'])}"
        return Run(str(result["stdout"] or "").encode(errors="replace"), ended, float(result["execution_time"] or 0))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SandboxError(f"malformed reply: {text[:100]!r}") from error

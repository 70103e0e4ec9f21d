"""Pages in a real browser: their DOM after they have loaded and their scripts have run."""

import re
import subprocess
import tempfile
from pathlib import Path

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=3000",
    "--window-size=1280,2000",
)


def browse(chromium: str, page: Path, script: str = "") -> str:
    """The DOM of a file, with `script` at its end."""
    if script:
        text = page.read_text()
        page = page.with_name("scripted-" + page.name)
        page.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    return visit(chromium, page.as_uri())


def visit(chromium: str, address: str, *flags: str) -> str:
    """The DOM of the page at an address."""
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, *FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom", address]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def attribute(dom: str, name: str) -> str | None:
    match = re.search(rf'<html[^>]* data-{name}="([^"]*)"', dom)
    return match and match.group(1)

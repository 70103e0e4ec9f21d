"""The model card of a run, and --push-to-hub with the real client against a local server that speaks the hub's API."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

import toy
from alula.config.load import load_config
from alula.run.model_card import model_card
from command_line import alula

TOKEN = "hf_" + "x" * 34


class Hub(ThreadingHTTPServer):
    """Accepts one commit of small files, and keeps them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.created: dict = {}
        self.files: dict[str, bytes] = {}


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.path == "/api/whoami-v2" and known:
            return self.send({"type": "user", "name": "me", "fullname": "me", "auth": {}, "orgs": []})
        self.send({"error": "unknown"}, 401 if not known else 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        home = f"http://127.0.0.1:{self.server.server_port}"
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            return self.send({"url": f"{home}/me/tiny", "id": "me/tiny"})
        if self.path == "/api/validate-yaml":
            return self.send({"errors": [], "warnings": []})
        if self.path == "/api/models/me/tiny/preupload/main":
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            return self.send({"files": [file | {"shouldIgnore": False, "oid": None} for file in files]})
        if self.path == "/api/models/me/tiny/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.send({"commitUrl": f"{home}/me/tiny/commit/1", "commitOid": "1", "hookOutput": ""})
        self.send({"error": "unknown"}, 404)

    def send(self, answer: dict, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def train(hub: Hub, out: Path, token: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    login = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
    command = [
        sys.executable,
        "-m",
        "alula",
        "train",
        str(toy.RECIPE),
        f"out={out}",
        "steps=1",
        "eval.size=8",
        *arguments,
    ]
    return subprocess.run(command, env=os.environ | login, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_push_to_hub_uploads_the_model(hub, tmp_path):
    refused = train(hub, tmp_path / "refused", "hf_" + "y" * 34, "--push-to-hub", "me/tiny")
    assert refused.returncode == 2
    assert "--push-to-hub me/tiny" in refused.stderr
    assert not (tmp_path / "refused").exists(), "before anything was done"
    done = train(hub, tmp_path / "run", TOKEN, "--push-to-hub", "me/tiny", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(f"uploaded to http://127.0.0.1:{hub.server_port}/me/tiny")
    assert (hub.created["name"], hub.created["organization"]) == ("tiny", "me")
    assert hub.created.get("private") or hub.created.get("visibility") == "private", hub.created
    model = tmp_path / "run" / "model"
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= hub.files.keys()


def test_a_run_has_a_model_card_and_is_not_uploaded_by_default(tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setitem(sys.modules, "alula.run.push", None)  # importing it raises
    assert alula("train", toy.RECIPE, f"out={out}", *toy.QUICK) == 0
    card = (out / "model" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert metadata["library_name"] == "transformers"
    assert "base_model" not in metadata, "random weights are no model of the hub"
    last = toy.rows(out, "evals.jsonl")[-1]
    error = f" ± {last['stderr']:.1%}" if last["stderr"] else ""
    assert f"| {last['name']} | dense | 4 | 8 | {last['accuracy']:.1%}{error} |" in body
    rewards = [row["reward/mean"] for row in toy.rows(out, "metrics.jsonl")]
    assert f"| `reward/mean` | {sum(rewards) / 4:.4g} |" in body
    assert "| correction | `sparse-rl` |" in body


def test_a_card_names_hub_ids_and_hides_local_folders(tmp_path):
    (tmp_path / "secret").mkdir()
    card = model_card(
        load_config("toy", ["model.source=Qwen/Qwen3-1.7B", f"data.source={tmp_path / 'secret'}"]), tmp_path
    )
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "Qwen/Qwen3-1.7B"
    assert str(tmp_path) not in card
    assert "`secret`" in card

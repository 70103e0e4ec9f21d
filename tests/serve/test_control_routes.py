"""Control routes: pause, abort, weights, sleep, metrics, keys; clients that go away; draining."""

import asyncio
import re
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from safetensors.torch import save_file

from alula.serve.generation import Generation
from served import byte_model, served, wait_until

LONG = {"token_ids": [5, 9, 14], "sampling_params": {"max_tokens": 120, "ignore_eos": True, "seed": 1}}
SHORT = {"token_ids": [5, 9, 14], "sampling_params": {"max_tokens": 4, "ignore_eos": True, "seed": 1}}
GENERATE = "/inference/v1/generate"


@pytest.fixture
def server(tmp_path):
    with (
        served(weights_folder=tmp_path / "weights", max_queue=8, max_body=4096) as (address, service),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client, service


class Background:
    """A request in another thread."""

    def __init__(self, client, body, path=GENERATE):
        self.answer = None
        self.thread = threading.Thread(target=self.run, args=(client, body, path))
        self.thread.start()

    def run(self, client, body, path):
        self.answer = client.post(path, json=body)

    def result(self):
        self.thread.join(60)
        assert self.answer is not None
        return self.answer


def running(service):
    return any(engine_rows(service))


def engine_rows(service):
    jobs = list(service.thread._jobs)
    return [s for request_id in jobs for s in service.engine.unfinished(request_id) if s.tokens]


def test_pause_keep_freezes_and_resume_goes_on(server):
    client, service = server
    expected = client.post(GENERATE, json=LONG).json()["choices"][0]["token_ids"]
    request = Background(client, LONG)
    wait_until(lambda: running(service))
    assert client.post("/pause").json() == {"status": "paused"}
    assert client.get("/is_paused").json() == {"is_paused": True}
    (sequence,) = engine_rows(service)
    count = len(sequence.tokens)
    late = Background(client, SHORT)
    time.sleep(0.3)
    assert len(sequence.tokens) == count < 120
    assert request.answer is None
    assert late.answer is None
    client.post("/resume")
    assert request.result().json()["choices"][0]["token_ids"] == expected
    assert late.result().status_code == 200


def test_pause_wait_finishes_what_runs_and_holds_what_comes(server):
    client, service = server
    request = Background(client, LONG)
    wait_until(lambda: running(service))
    pause = Background(client, None, "/pause?mode=wait")
    wait_until(lambda: service.thread._when_idle)
    late = Background(client, SHORT)
    assert pause.result().json() == {"status": "paused"}
    assert request.result().json()["choices"][0]["finish_reason"] == "length"
    time.sleep(0.1)
    assert late.answer is None
    client.post("/resume")
    assert late.result().status_code == 200


def test_what_waits_for_a_pause_ends_with_the_server(server, monkeypatch):
    client, service = server
    with monkeypatch.context() as patch:
        patch.setattr(service.engine, "step", lambda: time.sleep(0.01))  # the first request does not end meanwhile
        request = Background(client, LONG)
        wait_until(lambda: service.thread._jobs)
        pause = Background(client, None, "/pause?mode=wait")
        wait_until(lambda: service.thread._when_idle)
        late = Background(client, SHORT)
        wait_until(lambda: service.thread._held)
        asyncio.run_coroutine_threadsafe(service.thread.abort_all_if_stuck(), service.thread._loop).result(10)
        answer = late.result()
    assert answer.status_code == 500
    assert "paused" in answer.json()["error"]["message"]
    assert request.result().json()["choices"][0]["finish_reason"] == "length"
    assert pause.result().json() == {"status": "paused"}


def test_the_first_request_that_needs_statistics_waits_for_resume(server):
    client, service = server
    client.post("/pause")
    request = Background(client, SHORT | {"sparsity": "triattention:24+8,window=4,sinks=2"})
    wait_until(lambda: service.thread._held or request.answer)
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert request.answer is None
    client.post("/resume")
    assert request.result().status_code == 200
    assert service.engine.query_statistics is not None


def test_abort_by_pause_and_by_name(server):
    client, service = server
    request = Background(client, LONG)
    wait_until(lambda: running(service))
    client.post("/pause", params={"mode": "abort"})
    (choice,) = request.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 120
    client.post("/resume")
    one, other = Background(client, LONG | {"request_id": "one"}), Background(client, LONG | {"request_id": "other"})
    wait_until(lambda: len(engine_rows(service)) == 2)
    assert client.post("/abort_requests", json={"request_ids": ["one", "none"]}).json() == {"aborted": ["one"]}
    assert one.result().json()["choices"][0]["finish_reason"] == "abort"
    assert other.result().json()["choices"][0]["finish_reason"] == "length"
    assert service.engine.pool.in_use == 0
    client.post("/sleep")
    held = Background(client, LONG | {"request_id": "held"})
    wait_until(lambda: service.thread.jobs())
    client.post("/abort_requests", json={"request_ids": ["held"]})
    assert held.result().status_code == 400, "a client would repeat a 500"
    assert "aborted before it started" in held.result().json()["error"]["message"]
    client.post("/wake_up")


def test_sleep_takes_the_pool_and_wake_up_goes_on(server):
    client, service = server
    expected = client.post(GENERATE, json=LONG).json()["choices"][0]["token_ids"]
    request = Background(client, LONG)
    wait_until(lambda: running(service))
    assert client.post("/sleep").json() == {"is_sleeping": True}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    late = Background(client, SHORT)
    time.sleep(0.2)
    assert late.answer is None
    assert client.post("/sleep?level=2").status_code == 400
    client.post("/wake_up")
    assert request.result().json()["choices"][0]["token_ids"] == expected
    assert late.result().status_code == 200


def save_weights(folder: Path, seed: int, marker: bool = True) -> None:
    model = byte_model(seed).model
    folder.mkdir(parents=True)
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    if marker:
        (folder / "STABLE").touch()


def test_new_weights_from_a_folder(server, tmp_path):
    client, _service = server
    before = client.post(GENERATE, json=SHORT).json()["choices"][0]
    save_weights(tmp_path / "weights" / "step-1", seed=7)
    answer = client.post("/update_weights", json={"weight_dir": "step-1"})
    assert answer.json() == {"version": 1, "weight_dir": "step-1"}
    assert client.get("/weight_info").json() == {"version": 1, "weight_dir": "step-1"}
    after = client.post(GENERATE, json=SHORT).json()["choices"][0]
    assert (before["kv"]["policy_versions"], after["kv"]["policy_versions"]) == ([0], [1])
    assert after["kv"]["cached_prompt_tokens"] == 0
    with served(byte_model(7)) as (address, _):
        assert after["token_ids"] == httpx.post(address + GENERATE, json=SHORT).json()["choices"][0]["token_ids"]
    assert after["token_ids"] != before["token_ids"]
    absolute = str(tmp_path / "weights" / "step-1")
    assert client.post("/update_weights", json={"weight_dir": absolute, "version": 9}).json()["version"] == 9


def test_weights_that_are_rejected(server, tmp_path):
    client, _service = server
    root = tmp_path / "weights"
    save_weights(root / "unmarked", 7, marker=False)
    save_weights(tmp_path / "outside", 7)
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "circle").symlink_to(root / "circle")
    (root / "partial").mkdir()
    save_file({"model.norm.weight": byte_model().model.model.norm.weight.detach()}, root / "partial" / "a.safetensors")
    (root / "broken").mkdir()
    (root / "broken" / "a.safetensors").write_text("not safetensors")
    (root / "linked").mkdir()
    (root / "linked" / "a.safetensors").symlink_to(tmp_path / "outside" / "model.safetensors")
    for folder in ("partial", "broken", "linked"):
        (root / folder / "STABLE").touch()
    cases = {
        "unmarked": "STABLE",
        "../outside": "below",
        "link": "below",
        str(tmp_path / "outside"): "below",
        "linked": "outside",
        "/etc": "below",
        "missing": "no such folder",
        "partial": "parameters are not in",
        "broken": "cannot be read",
        "a\0b": "null",
        "a" * 300: "too long",
        "circle": "loop",
    }
    for folder, reason in cases.items():
        answer = client.post("/update_weights", json={"weight_dir": folder})
        assert answer.status_code == 400
        assert reason in answer.json()["error"]["message"]
    assert client.get("/weight_info").json() == {"version": 0, "weight_dir": None}
    with served() as (address, _):
        answer = httpx.post(f"{address}/update_weights", json={"weight_dir": "x"})
        assert answer.status_code == 400
        assert "--weights-folder" in answer.text


def test_a_client_that_goes_away_frees_its_pages(server):
    client, service = server
    engine = service.engine
    for path, body in [
        (GENERATE, LONG),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 120, "ignore_eos": True, "stream": True}),
        (GENERATE, LONG),
    ]:

        async def hang_up(path=path, body=body):
            async with httpx.AsyncClient(base_url=str(client.base_url)) as other:
                task = asyncio.create_task(other.post(path, json=body))
                while not running(service):
                    await asyncio.sleep(0.01)
                task.cancel()

        asyncio.run(hang_up())
        wait_until(lambda: engine.pool.in_use == 0 and service.load == 0)
    assert service.metrics.rollouts["abort"] == 3
    client.post("/pause")

    async def give_up():
        async with httpx.AsyncClient(base_url=str(client.base_url), timeout=0.3) as other:
            await other.post(GENERATE, json=LONG)

    with pytest.raises(httpx.ReadTimeout):
        asyncio.run(give_up())
    wait_until(lambda: service.load == 0 and not service.thread._jobs)
    client.post("/resume")
    assert client.post(GENERATE, json=SHORT).status_code == 200


def test_limits_of_queue_and_body(server, monkeypatch):
    client, service = server
    with monkeypatch.context() as patch:
        patch.setattr(service.engine, "tokenize", lambda prompt: pytest.fail("tokenized"))
        answer = client.post("/v1/completions", json={"prompt": ["a"] * 9})
        assert (answer.status_code, "9 rollouts" in answer.text) == (400, True)
    too_many = LONG | {"sampling_params": LONG["sampling_params"] | {"n": 9}}
    answer = client.post(GENERATE, json=too_many)
    assert (answer.status_code, "9 rollouts" in answer.text) == (400, True)
    full = Background(client, LONG | {"sampling_params": LONG["sampling_params"] | {"n": 8}})
    wait_until(lambda: service.load == 8)
    answer = client.post(GENERATE, json=SHORT)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert full.result().status_code == 200
    assert client.post(GENERATE, json=SHORT | {"token_ids": [1] * 4000}).status_code == 413
    assert client.post(GENERATE, json=SHORT).status_code == 200


def test_metrics_count(server):
    client, service = server
    client.post(GENERATE, json=SHORT, headers={"X-Session-ID": "m"})
    client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "stream": True})
    client.post(GENERATE, json={})
    text = client.get("/metrics").text
    values = dict(re.findall(r"^(alula_\S+) (\S+)$", text, re.MULTILINE))
    assert values['alula_responses_total{route="/inference/v1/generate",status="200"}'] == "1"
    assert values['alula_responses_total{route="/inference/v1/generate",status="400"}'] == "1"
    assert values['alula_rollouts_total{finish="length"}'] == "2"
    assert values['alula_session_turns_total{session="new"}'] == "1"
    assert values["alula_generated_tokens_total"] == "9"
    assert values["alula_prompt_tokens_total"] == "6"
    assert values["alula_open_sessions"] == "1"
    assert int(values["alula_kv_pages_in_use"]) == service.engine.pool.in_use > 0
    assert values["alula_request_seconds_count"] == "2"
    assert values["alula_first_token_seconds_count"] == "1"
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) alula_\w+ .+|alula_\w+(\{[^}]*\})? [-\d.e+]+", line), line


ROUTES = [
    ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/weight_info"), ("GET", "/is_paused"), ("GET", "/is_sleeping"),
    ("GET", "/nowhere"), ("POST", GENERATE), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("POST", "/pause"), ("POST", "/resume"), ("POST", "/abort_requests"), ("POST", "/update_weights"),
    ("POST", "/sleep"), ("POST", "/wake_up"), ("DELETE", "/sessions/x"),
]  # fmt: skip


def test_with_a_key_only_health_answers_without_it():
    with served(api_key="secret ü") as (address, service):
        assert httpx.get(f"{address}/health").status_code == 200
        for method, path in ROUTES:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret ü".encode()}):
                answer = httpx.request(method, address + path, headers=headers)
                assert answer.status_code == 401, path
                assert "API key" in answer.json()["error"]["message"]
        assert not service.engine.paused
        key = {"Authorization": "Bearer secret ü".encode()}
        assert httpx.get(f"{address}/v1/models", headers=key).status_code == 200
        assert httpx.post(address + GENERATE, json=SHORT, headers=key).status_code == 200


def test_without_a_key_other_sites_are_rejected(server):
    client, service = server
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "["}):
        assert client.post("/pause", headers=headers).status_code == 403
    assert not service.engine.paused
    assert client.get("/v1/models", headers={"Origin": "http://localhost:3000"}).status_code == 200


def test_a_failed_step_fails_its_requests_only(server, monkeypatch):
    client, service = server
    decode = service.engine.runner.decode
    monkeypatch.setattr(service.engine.runner, "decode", lambda *_: 1 / 0)
    answer = client.post(GENERATE, json=SHORT)
    assert answer.status_code == 500
    assert "ZeroDivisionError" in answer.json()["error"]["message"]
    assert client.get("/health").status_code == 200
    for _ in range(2):
        client.post(GENERATE, json=SHORT)
    assert client.get("/health").status_code == 503
    monkeypatch.setattr(service.engine.runner, "decode", decode)
    assert client.post(GENERATE, json=SHORT).status_code == 200
    assert client.get("/health").status_code == 200
    assert service.engine.pool.in_use == 0


@pytest.mark.parametrize("start", ["submit", "extend"])
def test_a_request_that_cannot_be_started_fails_alone(server, monkeypatch, start):
    client, service = server
    session = {"X-Session-ID": "a"}
    prompt = SHORT["token_ids"]
    kept = client.post(GENERATE, json=SHORT, headers=session).json()["choices"][0]["token_ids"]
    longer = SHORT | {"token_ids": [*prompt, *kept, 7]}
    other = Background(client, LONG)
    wait_until(lambda: running(service))
    with monkeypatch.context() as failing:
        failing.setattr(service.engine, start, lambda *_: bytearray(1 << 62))
        answer = client.post(GENERATE, json=longer, headers=session if start == "extend" else None)
    assert answer.status_code == 500
    assert "MemoryError" in answer.json()["error"]["message"]
    assert other.result().status_code == 200
    answer = client.post(GENERATE, json=longer, headers=session).json()
    assert answer["choices"][0]["kv"]["session"] == "continued"
    assert client.get("/health").status_code == 200


def test_a_server_whose_engine_has_ended_says_so_and_ends():
    with served() as (address, service), httpx.Client(base_url=address, timeout=10) as client:
        service.thread._commands.put(lambda ended: setattr(service.thread, "_stopped", True))
        service.thread._thread.join(10)
        for answer in (client.post(GENERATE, json=SHORT), client.post("/pause")):
            assert answer.status_code == 500
            assert "restart the server" in answer.json()["error"]["message"]
        assert client.get("/health").status_code == 503
        assert service.load == 0


@pytest.mark.parametrize("what", ["start", "sleep"])
def test_requests_that_end_with_a_failure_of_another_are_told(server, monkeypatch, what):
    """A failure while the engine measures queries, or while it swaps, drops all that runs."""
    client, service = server
    other = Background(client, LONG)
    wait_until(lambda: running(service))
    with monkeypatch.context() as failing:
        if what == "sleep":
            failing.setattr("alula.engine.engine_core.swap_out", lambda *_: bytearray(1 << 62))
            answer = client.post("/sleep")
        else:
            failing.setattr(service.engine.runner, "decode", lambda *_: bytearray(1 << 62))
            answer = client.post(GENERATE, json=SHORT | {"sparsity": "triattention:16+4,window=2,sinks=1"})
        assert answer.status_code == 500
        answer = other.result()
        assert answer.status_code == 500
        assert "the engine failed" in answer.json()["error"]["message"]
    assert client.post(GENERATE, json=SHORT).status_code == 200
    assert service.load == 0
    assert service.engine.pool.in_use == 0


def test_whoever_ends_the_thread_is_told(monkeypatch):
    with served() as (address, service), httpx.Client(base_url=address, timeout=20) as client:
        monkeypatch.setattr(service.engine, "submit", lambda *_: sys.exit(1))
        first, second = client.post(GENERATE, json=SHORT), client.post("/pause")
        for answer in (first, second):
            assert answer.status_code == 500
            assert "SystemExit" in answer.json()["error"]["message"]


def test_nobody_waits_for_an_engine_that_has_failed(monkeypatch):
    """Whatever its thread did when it failed: a running request, a pause that waits for it, and later requests end."""
    with served() as (address, service), httpx.Client(base_url=address, timeout=20) as client:
        request = Background(client, LONG)
        wait_until(lambda: running(service))
        pause = Background(client, {}, "/pause?mode=wait")
        wait_until(lambda: service.thread._when_idle)
        monkeypatch.setattr(service.engine, "finished", lambda: 1 / 0)
        for answer in (request.result(), pause.result(), client.post(GENERATE, json=SHORT), client.post("/resume")):
            assert answer.status_code == 500
            assert "ZeroDivisionError" in answer.json()["error"]["message"]
        assert client.get("/health").status_code == 503
        assert service.load == 0


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_prompt_that_takes_long_to_tokenize_holds_up_no_one(server, monkeypatch, route):
    client, service = server
    began, go_on = threading.Event(), threading.Event()

    def slow(*_):
        began.set()
        go_on.wait(20)
        return [5, 9, 14]

    monkeypatch.setattr(service.engine.inputs, "tokenize", slow)
    monkeypatch.setattr(Generation, "chat_prompt", slow)
    text = {"prompt": "a"} if route == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    request = Background(client, text | {"max_tokens": 4}, f"/v1/{route}")
    try:
        assert began.wait(10)
        assert client.get("/health", timeout=5).status_code == 200
    finally:
        go_on.set()
    assert request.result().status_code == 200

"""`alula serve` as a process: what it prints, what it rejects, how it ends."""

import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from command_line import alula
from served import served

COMMAND = [sys.executable, "-u", "-m", "alula", "serve", "shape:tiny-llama", "--device", "cpu", "--port", "0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "beyond localhost the server needs --api-key"),
        (["--api-key", ""], "--api-key: is empty"),
        (["--api-key", "secret\n"], "has a space or a line break at an end"),
        (["--port", "70000"], "--port 70000"),
        (["--sparsity", "rvk:5"], "did you mean 'rkv'?"),
    ],
)
def test_settings_that_are_rejected(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("ALULA_API_KEY", raising=False)
    assert alula("serve", "shape:tiny-llama", "--device", "cpu", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_sigterm_finishes_what_runs_and_takes_nothing_new():
    process = subprocess.Popen(
        [*COMMAND, "--sparsity", "rkv:24+8", "--host", "0.0.0.0", "--api-key", "k"], stdout=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    assert line.startswith("Serving shape:tiny-llama (rkv:24+8) on http://0.0.0.0:")
    address = "http://127.0.0.1:" + re.search(r":(\d+);", line)[1]
    body = {"token_ids": [5, 9], "sampling_params": {"max_tokens": 400, "ignore_eos": True}}
    answers = []
    headers = {"Authorization": "Bearer k"}
    try:
        with httpx.Client(
            base_url=address, headers=headers, timeout=60, transport=httpx.HTTPTransport(retries=20)
        ) as client:
            assert client.post("/inference/v1/generate", json=body | {"token_ids": [3]}).status_code == 200
            thread = threading.Thread(
                target=lambda: answers.append(
                    httpx.post(f"{address}/inference/v1/generate", json=body, headers=headers, timeout=60)
                )
            )
            thread.start()
            while "running_rollouts 1" not in client.get("/metrics").text:
                pass
            process.send_signal(signal.SIGTERM)
            thread.join(60)
            assert process.wait(30) == 0
        (answer,) = answers
        assert len(answer.json()["choices"][0]["token_ids"]) == 400
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")
    finally:
        process.kill()


def long_request(process, answers):
    """A thread that waits for an answer of the server's longest kind, once it decodes."""
    address = "http://127.0.0.1:" + re.search(r":(\d+);", process.stdout.readline())[1]
    body = {"token_ids": [5, 9], "sampling_params": {"ignore_eos": True}}
    with httpx.Client(base_url=address, timeout=60, transport=httpx.HTTPTransport(retries=20)) as client:
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{address}/inference/v1/generate", json=body, timeout=60))
        )
        thread.start()
        while "running_rollouts 1" not in client.get("/metrics").text:
            pass
    return thread


@pytest.mark.slow
def test_what_still_runs_after_the_drain_timeout_is_answered_with_the_tokens_so_far():
    process = subprocess.Popen(
        [*COMMAND, "--drain-timeout", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    answers = []
    try:
        thread = long_request(process, answers)
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
    (choice,) = answers[0].json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) > 0


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once_without_a_crash():
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        thread = long_request(process, [])
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
        thread.join(60)
    finally:
        process.kill()


@pytest.mark.slow
def test_sigterm_ends_a_paused_server():
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    address = "http://127.0.0.1:" + re.search(r":(\d+);", process.stdout.readline())[1]
    answers = []
    try:
        with httpx.Client(base_url=address, timeout=60, transport=httpx.HTTPTransport(retries=20)) as client:
            client.post("/pause")
            body = {"token_ids": [5, 9], "sampling_params": {"max_tokens": 4}}
            thread = threading.Thread(
                target=lambda: answers.append(httpx.post(f"{address}/inference/v1/generate", json=body, timeout=60))
            )
            thread.start()
            while "waiting_rollouts 1" not in client.get("/metrics").text:
                pass
            process.send_signal(signal.SIGTERM)
            thread.join(60)
            assert process.wait(30) == 0
        assert answers[0].status_code == 500
        assert "paused" in answers[0].json()["error"]["message"]
    finally:
        process.kill()


def test_answers_are_sent_at_once():
    """Without TCP_NODELAY every answer takes 40 ms longer."""
    with served() as (address, _), httpx.Client(base_url=address) as client:
        client.get("/v1/models")
        times = []
        for _ in range(15):
            start = time.perf_counter()
            client.get("/v1/models")
            times.append(time.perf_counter() - start)
    assert sorted(times)[3] < 0.02

"""Bad bodies get a 4xx and one sentence that names the problem, and the server serves on."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from served import byte_model, served

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]
NESTED = '{"prompt":' + "[" * 100_000
CASES = [
    (COMPLETIONS, b"", "not valid JSON"),
    (COMPLETIONS, b"{", "not valid JSON"),
    (COMPLETIONS, b"\xff\xfe\x00", "not valid JSON"),
    (COMPLETIONS, NESTED, "not valid JSON"),
    (COMPLETIONS, "[1, 2]", "JSON object"),
    (COMPLETIONS, '"text"', "JSON object"),
    (COMPLETIONS, '{"prompt": "\\ud800"}', "not valid JSON"),
    (COMPLETIONS, {}, "prompt: this field is required"),
    (COMPLETIONS, {"prompt": "a", "max_token": 3}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
    (COMPLETIONS, {"prompt": None}, "prompt: must be a text"),
    (COMPLETIONS, {"prompt": []}, "prompt: it is empty"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt 0 is empty"),
    (COMPLETIONS, {"prompt": ["a", 3]}, "prompt: must be a text"),
    (COMPLETIONS, {"prompt": [3, -1]}, "-1"),
    (COMPLETIONS, {"prompt": [10**30]}, "outside 0..258"),
    (COMPLETIONS, {"prompt": "a" * 3000}, "3000 tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens=0"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**40}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2**31 - 1}, "max_tokens=2147483647"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "7"}, "max_tokens='7'"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n=0"),
    (COMPLETIONS, {"prompt": "a", "n": 2**31 - 1}, "n=2147483647"),
    (COMPLETIONS, {"prompt": "a", "n": 65}, "65 rollouts"),
    (COMPLETIONS, '{"prompt": "a", "temperature": NaN}', "temperature"),
    (COMPLETIONS, '{"prompt": "a", "temperature": 1e999}', "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature=-1.0"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p=0"),
    (COMPLETIONS, {"prompt": "a", "top_k": 5, "logprobs": 1}, "logprobs with top_p=1.0, top_k=5"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs=21"),
    (COMPLETIONS, {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty=0.5: not supported"),
    (COMPLETIONS, {"prompt": "a", "echo": True}, "echo=True: not supported"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias=1: not supported"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop=''"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, "stop: must be"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [999]}, "stop holds the token id 999"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"usage": True}}, "unknown field 'stream_options.usage'"),
    (COMPLETIONS, {"prompt": "a", "sparsity": "rvk:512"}, "did you mean 'rkv'?"),
    (COMPLETIONS, {"prompt": "a", "sparsity": "rkv:/etc/passwd"}, "a budget is a number"),
    (COMPLETIONS, {"prompt": "a", "sparsity": "rkv:0"}, "budget"),
    (COMPLETIONS, {"prompt": "a", "sparsity": "quest:64,block=8"}, "select.block=8"),
    (COMPLETIONS, {"prompt": "a", "model": "gpt"}, "model='gpt'"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": ["a"]}, "messages"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, "no such role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content: only parts"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools: tool calls are not supported"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice: tool calls are not supported"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name=5"),
    (CHAT, {"messages": USER, "max_tokens": 5000, "sparsity": "rkv:24+8"}, "max_tokens=5000"),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs: needs logprobs=true"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (GENERATE, {"token_ids": []}, "empty"),
    (GENERATE, {"token_ids": "abc"}, "token_ids="),
    (GENERATE, {"token_ids": [1.5]}, "token_ids=1.5"),
    (GENERATE, {"token_ids": [True]}, "token_ids=True"),
    (GENERATE, {"token_ids": [5], "sampling_params": {"best_of": 2}}, "unknown field 'sampling_params.best_of'"),
    (GENERATE, {"token_ids": [5], "stream": True}, "stream=True: not supported"),
    (GENERATE, {"token_ids": [5], "priority": 3}, "priority=3: not supported"),
    ("/abort_requests", {"request_ids": "all"}, "request_ids="),
    ("/update_weights", {"path": "x"}, "weight_dir: this field is required"),
    ("/pause?mode=never", {}, "mode='never'"),
    ("/pause?now=1", {}, "unknown query parameter 'now'"),
    ("/nowhere", {}, "/nowhere: Not Found"),
]


@pytest.fixture(scope="module")
def client():
    with served(max_queue=64) as (address, _), httpx.Client(base_url=address, timeout=60) as client:
        yield client


def still_serves(client):
    answer = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    assert answer.status_code == 200


def rejected(answer):
    assert 400 <= answer.status_code < 500, answer.text
    message = answer.json()["error"]["message"]
    assert message.endswith((".", "?"))
    assert "\n" not in message
    assert len(message) < 700
    return message


@pytest.mark.parametrize(("path", "body", "expected"), CASES, ids=[f"{p} {str(b)[:50]}" for p, b, _ in CASES])
def test_bad_bodies_are_named(client, path, body, expected):
    content = json.dumps(body) if isinstance(body, dict) else body
    assert expected in rejected(client.post(path, content=content))


def test_the_server_serves_on(client):
    still_serves(client)
    long = {"prompt": "a", "stop": ["\x00" * 100_000], "max_tokens": 3, "ignore_eos": True}
    assert client.post(COMPLETIONS, json=long).status_code == 200
    headers = {"X-Session-ID": "s" * 300}
    assert "X-Session-ID" in rejected(client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers))
    two = {"prompt": ["a", "b"]}
    assert "X-Session-ID" in rejected(client.post(COMPLETIONS, json=two, headers={"X-Session-ID": "s"}))
    assert client.get(COMPLETIONS).status_code == 405


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["prompt", "messages", "token_ids", "max_tokens", "n", "temperature", "top_p", "top_k", "seed", "stop", "logprobs",
     "stop_token_ids", "stream", "stream_options", "sparsity", "sampling_params", "model", "min_tokens", "ignore_eos"]
)  # fmt: skip
BODIES = (
    st.binary(max_size=200)
    | ANY_JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(FIELDS, ANY_JSON, max_size=6).map(lambda value: json.dumps(value).encode())
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([GENERATE, COMPLETIONS, CHAT]), body=BODIES)
def test_fuzzed_bodies(client, path, body):
    answer = client.post(path, content=body)
    if answer.status_code != 200:
        rejected(answer)


def test_after_all_that(client):
    still_serves(client)


def test_a_model_without_tokenizer_takes_token_ids_only():
    from dataclasses import replace

    with served(replace(byte_model(), tokenizer=None)) as (address, _):
        assert "no tokenizer" in rejected(httpx.post(address + COMPLETIONS, json={"prompt": "a"}))
        body = {"token_ids": [5], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
        assert len(httpx.post(address + GENERATE, json=body).json()["choices"][0]["token_ids"]) == 2

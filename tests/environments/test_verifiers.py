"""Environments of the `verifiers` package, run by its own harness: its requests are answered turn by turn."""

import os
import sys
import time
from pathlib import Path

import hypothesis  # noqa: F401 - its pytest plugin would import it at the end, beside verifiers' threads: CPython 3.11 fails
import pytest

import toy
from alula.config.load import load_config
from alula.data.load import load_source
from alula.environments.calls import Calls
from alula.environments.registry import load_environment
from alula.environments.verifiers import as_text, assistant_message
from alula.errors import SettingError
from alula.settings import Source

pytest.importorskip("verifiers.v1")

EXAMPLES = Path(__file__).parents[2] / "examples" / "verifiers"
UV = """#!/bin/sh
case "$*" in
  *--help*) echo -- --script;;
  "python find"*) echo {python};;
esac
"""


@pytest.fixture(autouse=True)
def in_the_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def uv(tmp_path, monkeypatch):
    """verifiers prepares its chat program with uv, which would download packages: this one names our Python."""
    (tmp_path / ".local" / "bin").mkdir(parents=True)
    command = tmp_path / ".local" / "bin" / "uv"
    command.write_text(UV.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def call(calls, function, *arguments):
    calls.start("call", lambda: calls.resolve(function(*arguments)))
    while not (outcomes := calls.poll(wait=True)):
        pass
    assert outcomes[0].failure is None, outcomes[0].failure
    return outcomes[0].value


@pytest.mark.slow
def test_an_episode_of_several_turns(uv):
    data = load_source(Source(source="verifiers:vf_lookup", size=4, options={"hops": 2}))
    assert len(data) == 4
    example = data[2].record()
    build, calls = load_environment("verifiers:vf_lookup", {"taskset": {"hops": 2}}), Calls(60)
    first, second = example["table"]
    number = example["table"][second]
    for answer, reward in ((number, 1.0), ("9", 0.0)):
        environment = build()
        assert call(calls, environment.reset, example, 0) == [{"role": "user", "content": example["prompt"]}]
        messages, partial, done = call(calls, environment.step, first)
        assert (messages, partial, done) == ([{"role": "user", "content": f"{first} > {second}"}], 0.0, False)
        messages, _, done = call(calls, environment.step, second)
        assert messages[0]["content"] == f"{second} > {number}"
        assert call(calls, environment.step, answer) == ([], reward, True)
    given_up = build()
    call(calls, given_up.reset, example, 0)
    call(calls, given_up.close)
    calls.timeout = 0.2  # verifiers takes longer to start its chat program
    late = build()
    calls.start("reset", lambda: calls.resolve(late.reset(example, 0)))
    while not (outcomes := calls.poll(wait=1)):
        pass
    assert outcomes[0].failure == "no answer within 0.2 s"
    deadline = time.monotonic() + 20
    while not late.episode.done():
        assert time.monotonic() < deadline, "an episode that was given up goes on"
        time.sleep(0.01)


@pytest.mark.slow
def test_the_example_trains(uv, tmp_path):
    run = toy.trainer(load_config(EXAMPLES / "lookup.yaml", [f"out={tmp_path / 'run'}", "sampling.n=2"]))
    run.train_step()
    [row] = toy.rows(tmp_path / "run", "metrics.jsonl")
    assert row["environment/failed"] == 0
    assert row["environment/turns"] >= 1


def test_the_wordle_recipe_is_valid():
    config = load_config(EXAMPLES / "wordle.yaml")
    assert config.environment.options["taskset"] == config.data.options


def test_tool_calls_are_read_from_the_text():
    text = 'I look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    message = assistant_message(text, [{"type": "function"}])
    assert message["content"] == "I look."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert assistant_message(text, None) == {"role": "assistant", "content": text}
    digits, depth = "1" * 5000, 100_000
    for broken in (
        "{not json}",
        f'{{"name": {digits}}}',
        '{"name": "add", "arguments": ' + "[" * depth + "]" * depth + "}",
    ):
        turn = f"<tool_call>{broken}</tool_call>"
        assert assistant_message(turn, [{}]) == {"role": "assistant", "content": turn}


def test_messages_as_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert as_text({"role": "tool", "content": parts, "tool_call_id": "1"}) == {"role": "tool", "content": "ab"}
    assert as_text({"role": "assistant", "content": None}) == {"role": "assistant", "content": ""}
    with pytest.raises(SettingError, match="image_url"):
        as_text({"role": "user", "content": [{"type": "image_url"}]})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("no_such_taskset", {}, "cannot be loaded"), ("vf_lookup", {"taskset": {"hop": 1}}, "hop")],
)
def test_wrong_names_and_options_raise(name, options, message):
    with pytest.raises(SettingError, match=message):
        load_environment(f"verifiers:{name}", options)

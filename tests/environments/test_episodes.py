"""Episodes on a tiny model: the environment's calls beside the engine, its limits and failures, what is returned."""

import random
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alula import Engine, Evict, Sampling, Sparsity
from alula.data.load_tokenizer import attach_tokenizer
from alula.data.tasks import build as build_task
from alula.data.tasks.tokenizer import task_tokenizer
from alula.environments.conversation import Conversation
from alula.environments.episodes import Episodes, Start, Turn, checked
from alula.environments.lookup import Lookup
from alula.environments.registry import load_environment
from alula.errors import SettingError
from alula.models.load import load_model
from alula.rollouts.job import Job
from alula.rollouts.local_rollouts import LocalRollouts
from alula.settings import EnvironmentSettings
from alula.trainer.reroll import spliced
from served import wait_until

TASK = build_task("lookup", symbols=4, hops=2)
EXAMPLES = [example.record() for example in TASK.dataset(6)]
STOPS = tuple(range(4, 12))
"""The letters and numbers: a turn ends with the first of them."""
EVICTING = Sparsity(Evict("snapkv", 6, buffer=2, window=2, sinks=1))
SAMPLING = Sampling(max_new_tokens=3, seed=7, stop=STOPS)


@pytest.fixture(scope="module")
def loaded():
    return attach_tokenizer(load_model("shape:tiny-llama", seed=1), task_tokenizer(TASK), resize=True)


def engine_of(loaded, **options):
    return Engine(loaded, **({"page": 4, "kv_memory": "4MiB", "max_rows": 16} | options))


class Player(LocalRollouts):
    """Plays episodes on an engine."""

    def play(self, starts, sampling, sparsity):
        return self.generate([Job((), sampling, sparsity, start=start) for start in starts])


def episodes_of(engine, build=Lookup, **settings):
    settings = {"use": "lookup", "max_turns": 5, "max_tokens": 40, "timeout": 20.0} | settings
    return Player(engine, Episodes(EnvironmentSettings(**settings), build, engine, Conversation(engine.tokenizer)))


def starts(samples=4):
    return [Start(example, 100 + i, i, s) for i, example in enumerate(EXAMPLES) for s in range(samples)]


class Talkative:
    """Never done: says the same again and again."""

    def reset(self, example, seed):
        return example["prompt"]

    def step(self, completion):
        return "a > b", 0.5, False


@pytest.mark.parametrize("policy", [Sparsity(), EVICTING], ids=["dense", "evicting"])
def test_an_episode_is_what_the_engine_and_the_environment_did(loaded, policy):
    engine = engine_of(loaded)
    played = episodes_of(engine).play(starts(), SAMPLING, policy)
    assert [(e.prompt_index, e.sample_index) for e in played] == [(i, s) for i in range(6) for s in range(4)]
    assert len({len(e.turns) for e in played}) > 1
    chat = Conversation(engine.tokenizer)
    for episode in played:
        environment, example = Lookup(), EXAMPLES[episode.prompt_index]
        assert episode.prompt_ids == chat.prompt([{"role": "user", "content": environment.reset(example, 0)}])
        total, tokens = 0.0, []
        for number, turn in enumerate(episode.turns):
            end = episode.turns[number + 1].start if number + 1 < len(episode.turns) else len(episode)
            messages, reward, done = environment.step(turn.completion)
            total += reward
            given = chat.between([], turn.messages, -1) if turn.messages else []
            mine = episode.token_ids[turn.start : end]
            text = engine.tokenizer.decode(mine[: len(mine) - len(given)], skip_special_tokens=True)
            assert text == turn.completion
            assert not done or number + 1 == len(episode.turns)
            if turn.messages:
                assert turn.messages == [{"role": "user", "content": messages}]
                assert mine[len(mine) - len(given) :] == given
            tokens += [True] * (len(mine) - len(given)) + [False] * len(given)
        assert episode.reward == pytest.approx(total)
        assert episode.sampled.tolist() == tokens
        assert episode.logprobs.isnan().tolist() == [not sampled for sampled in tokens]
        assert episode.text == episode.turns[-1].completion
    assert any(e.kv.evictions for e in played) == (policy is EVICTING)
    assert engine.pool.in_use == 0
    assert engine.sessions == {}


class Delayed(Lookup):
    """A tool whose answers take a random time."""

    def step(self, completion):
        time.sleep(random.random() * 0.03)
        return super().step(completion)


class AsyncLookup(Lookup):
    async def reset(self, example, seed):
        return super().reset(example, seed)

    async def step(self, completion):
        return super().step(completion)


@pytest.mark.parametrize("policy", [Sparsity(), EVICTING], ids=["dense", "evicting"])
@pytest.mark.parametrize("build", [Delayed, AsyncLookup])
def test_results_do_not_depend_on_how_long_tools_take(loaded, policy, build):
    expected = episodes_of(engine_of(loaded, buckets=[16])).play(starts(), SAMPLING, policy)
    played = episodes_of(engine_of(loaded, buckets=[16]), build).play(starts(), SAMPLING, policy)
    for one, other in zip(expected, played, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.logprobs.view(torch.int32), other.logprobs.view(torch.int32))
        assert (one.reward, one.finish) == (other.reward, other.finish)


@pytest.mark.parametrize("policy", [Sparsity(), EVICTING], ids=["dense", "evicting"])
def test_chunks_of_several_steps_change_nothing(loaded, policy):
    """As on CUDA: several steps are launched at a time, and the host reads a chunk while the next one runs."""
    expected = episodes_of(engine_of(loaded)).play(starts(), SAMPLING, policy)
    engine = engine_of(loaded, lookahead=3)
    engine._in_flight = 1
    played = episodes_of(engine, Delayed).play(starts(), SAMPLING, policy)
    for one, other in zip(expected, played, strict=True):
        assert (one.token_ids, one.finish, one.reward) == (other.token_ids, other.finish, other.reward)
        torch.testing.assert_close(one.logprobs, other.logprobs, equal_nan=True, rtol=0, atol=1e-5)
    assert engine.pool.in_use == 0


def test_a_slow_tool_does_not_stop_other_rows(loaded):
    ends, release = {}, threading.Event()

    class SlowForOne(Lookup):
        def reset(self, example, seed):
            self.slow = seed == 100
            return super().reset(example, seed)

        def step(self, completion):
            if self.slow:
                release.wait(10)
            answer = super().step(completion)
            ends.setdefault(self.slow, []).append(time.monotonic())
            if not self.slow and len(ends[False]) > 8:
                release.set()  # the others have gone through several turns
            return answer

    everyone = starts(2)
    played = episodes_of(engine_of(loaded), SlowForOne).play(everyone, SAMPLING, Sparsity())
    assert len(ends[False]) > 8
    assert ends[False][8] < min(ends[True])
    assert all(e.failure is None for e in played)
    assert max(e.waited for e in played[:2]) > 0


def test_failures_end_an_episode_and_no_other(loaded):
    class Fails(Lookup):
        def reset(self, example, seed):
            if seed == 100:
                raise OSError("no database")
            self.number = seed - 100
            return super().reset(example, seed)

        def step(self, completion):
            match self.number:
                case 1:
                    time.sleep(30)
                case 2:
                    return "a", float("nan"), False
                case 3:
                    return 5, 0.0, False
                case 4:
                    return [], 0.0, False
            return super().step(completion)

    engine = engine_of(loaded)
    played = episodes_of(engine, Fails, timeout=0.5).play(starts(1), SAMPLING, EVICTING)
    reasons = [episode.failure for episode in played]
    assert re.fullmatch(r"OSError: no database \(test_episodes\.py, line \d+\)", reasons[0])
    assert reasons[1] == "no answer within 0.5 s"
    assert "reward is nan" in reasons[2]
    assert "instead of messages" in reasons[3]
    assert "no message" in reasons[4]
    assert reasons[5] is None
    assert [episode.finish == "error" for episode in played] == [True] * 5 + [False]
    assert len(played[0]) == 0
    assert all(len(episode) > 0 for episode in played[1:])
    assert engine.pool.in_use == 0


@pytest.mark.parametrize("answer", [("a", 0.0), ("a", None, True), None, 3])
def test_a_step_that_returns_something_else_is_shown(answer):
    with pytest.raises(SettingError, match=rf"step.* {re.escape(repr(answer))} "):
        checked(answer)


def test_a_turn_that_the_engine_rejects_is_not_counted(loaded):
    """Messages so long that the KV memory cannot hold them."""

    class Verbose(Talkative):
        def step(self, completion):
            return "a > b " * 40, 0.5, False

    engine = engine_of(loaded, kv_memory="64KiB")
    played = episodes_of(engine, Verbose, max_tokens=400).play(starts(1), SAMPLING, Sparsity())
    assert all("kv_memory" in episode.failure for episode in played)
    for episode in played:
        assert (len(episode.turns), episode.turns[0].messages) == (1, [])
        assert episode.text == episode.turns[0].completion
    assert engine.pool.in_use == 0


@pytest.mark.parametrize(
    ("settings", "turns", "tokens"), [({"max_turns": 3}, 3, None), ({"max_turns": 99, "max_tokens": 17}, None, 17)]
)
def test_limits_of_an_episode(loaded, settings, turns, tokens):
    engine = engine_of(loaded)
    played = episodes_of(engine, Talkative, **settings).play(starts(2), SAMPLING, Sparsity())
    assert any(episode.finish == "length" and len(episode.turns) > 1 for episode in played)
    for episode in played:
        assert turns is None or len(episode.turns) <= turns
        assert tokens is None or len(episode.prompt_ids) + len(episode) <= tokens
        assert episode.reward == 0.5 * len(episode.turns), "a cut turn is rewarded too"
        assert episode.sampled[-1], "an episode ends with a sampled token"
    assert engine.pool.in_use == 0


def test_a_prompt_over_the_limit_is_a_failure(loaded):
    [episode] = episodes_of(engine_of(loaded), max_tokens=3).play(starts(1)[:1], SAMPLING, Sparsity())
    assert "environment.max_tokens is 3" in episode.failure


def test_an_interruption_leaves_nothing_behind(loaded):
    engine = engine_of(loaded)
    episodes = episodes_of(engine, Talkative)
    rounds = iter(range(100))

    def interrupt():
        if next(rounds) > 5:
            raise KeyboardInterrupt

    episodes.check_stop = interrupt
    with pytest.raises(KeyboardInterrupt):
        episodes.play(starts(), SAMPLING, EVICTING)
    episodes.check_stop = lambda: None
    played = episodes.play(starts(1), SAMPLING, EVICTING)
    assert len(played) == 6
    assert engine.pool.in_use == 0


def test_every_environment_is_closed_once(loaded):
    """After a failed reset, a failed replay, a reset that returns too late, an end, and an interruption."""
    opened, closed, go_on, stop = [], [], threading.Event(), False

    class Closes(Talkative):
        def __init__(self):
            opened.append(self)

        def reset(self, example, seed):
            if seed == 100:
                raise OSError("no database")
            if seed == 101:
                go_on.wait(20)
            return super().reset(example, seed)

        async def close(self):
            closed.append(self)

    def interrupt():
        if stop and engine._live:
            raise KeyboardInterrupt

    engine = engine_of(loaded)
    episodes = episodes_of(engine, Closes, timeout=0.5, max_turns=2)
    episodes.check_stop = interrupt
    everyone = starts(1)
    everyone[2] = replace(everyone[2], replay=[Turn(0, "a", [{"role": "user", "content": "something else"}])])
    played = episodes.play(everyone, SAMPLING, Sparsity())
    assert [episode.failure is None for episode in played] == [False] * 3 + [True] * 3
    episodes.close()
    late = set(opened) - set(closed)
    assert len(closed) == 5
    assert len(late) == 1, "it is still being reset"
    go_on.set()
    wait_until(lambda: late <= set(closed))
    stop = True
    with pytest.raises(KeyboardInterrupt):
        episodes.play(starts()[8:], SAMPLING, Sparsity())
    wait_until(lambda: len(closed) == len(opened) > 6)
    assert len(set(closed)) == len(closed)


def test_a_replay_continues_inside_a_turn(loaded):
    """From the same prefix with the same key, dense sampling finds the same rest of the episode again."""
    engine = engine_of(loaded, buckets=[16])
    episodes = episodes_of(engine)
    played = episodes.play(starts(), SAMPLING, Sparsity())
    whole = next(e for e in played if len(e.turns) > 2 and e.finish == "stop")
    second = whole.turns[1]
    start = Start(
        EXAMPLES[whole.prompt_index],
        100 + whole.prompt_index,
        whole.prompt_index,
        whole.sample_index,
        replay=whole.turns[:1],
        prefix=whole.token_ids[: second.start],
    )
    [rest] = episodes.play([start], SAMPLING, Sparsity())
    assert [*start.prefix, *rest.token_ids] == whole.token_ids
    assert rest.reward == pytest.approx(whole.reward)
    assert [turn.completion for turn in rest.turns] == [turn.completion for turn in whole.turns]
    changed = replace(start, replay=[replace(whole.turns[0], messages=[{"role": "user", "content": "other"}])])
    [failed] = episodes.play([changed], SAMPLING, Sparsity())
    assert "not replayable" in failed.failure
    first = second.start
    joined = spliced(whole, first, rest, engine.tokenizer)
    assert joined.token_ids == whole.token_ids
    assert joined.turns == whole.turns
    assert joined.spans == whole.spans
    given_up = spliced(whole, first, failed, engine.tokenizer)
    assert (given_up.finish, given_up.failure, len(given_up)) == ("error", failed.failure, first)
    assert len(given_up.sampled) == first


def test_environments_by_name():
    assert isinstance(load_environment("lookup", {})(), Lookup)
    assert isinstance(load_environment("alula.environments.lookup:Lookup", {})(), Lookup)
    for use, options, message in (
        ("lookups", {}, "did you mean"),
        ("lookup", {"size": 3}, "size"),
        ("no_such_module:Class", {}, "not found"),
        ("alula.environments.lookup:Lookups", {}, "did you mean"),
        ("alula.environments.calls:Call", {}, "no reset and no step"),
    ):
        with pytest.raises(SettingError, match=message):
            load_environment(use, options)


def test_the_example_of_the_page_is_an_environment():
    code = (Path(__file__).parents[2] / "docs" / "environments.md").read_text().partition("```python")[2]
    names: dict = {}
    exec(code.partition("```")[0], names)
    environment = names["Calculator"]()
    assert "ANSWER" in environment.reset({"prompt": "2 + 3?", "answer": 5}, 0)[0]["content"]
    assert environment.step("ADD 2 3") == ([{"role": "user", "content": "5"}], 0.0, False)
    assert "whole numbers" in environment.step("ADD two")[0][0]["content"]
    assert environment.step("")[2] is False
    assert environment.step("ANSWER 5") == ("", 1.0, True)
    assert environment.step("ANSWER 6") == ("", 0.0, True)

"""Episodes: rollouts of several turns. The engine samples while environments answer in other threads.

    reset → prompt → [turn of the policy → step → tokens of its messages]* → episode

Random numbers are keyed by prompt, sample and position, so an episode does not depend on how long environments take
(bit for bit with a single `engine.buckets`).
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from alula.data.dataset import Messages
from alula.engine.engine import Engine
from alula.engine.rollout import Finish, Rollout, Sampling
from alula.engine.sequence import rollout_key
from alula.engine.stop_strings import answer_text, resolve_stops
from alula.environments.calls import Calls, Outcome
from alula.environments.conversation import Conversation, as_messages
from alula.environments.environment import Environment
from alula.environments.registry import Build
from alula.errors import SettingError, require, with_place
from alula.settings import EnvironmentSettings
from alula.sparsity.policy import Sparsity

GRACE = 0.002
"""Seconds to wait for calls in progress before the engine's next step: turns that start together share passes."""
CLOSING = 2.0
"""Seconds to wait for environments to close when episodes are given up: the process may end next."""


@dataclass
class Turn:
    """One turn of the policy, and the environment's answer."""

    start: int
    """Index of its first token in the rollout."""
    completion: str
    messages: Messages = field(default_factory=list)
    """What the environment answered; empty after the last turn."""


@dataclass
class Episode(Rollout):
    """A rollout of several turns. `text` is the last turn's, `reward` the sum of the environment's rewards.

    `finish` is "stop" if the environment ended it, "length" at a limit (tokens of a turn, turns, tokens of the
    episode), and "error" if the environment failed: such an episode is not trained on.
    """

    turns: list[Turn] = field(default_factory=list)
    failure: str | None = None
    """Why the environment was given up."""
    unclosed: list[str] = field(default_factory=list)
    """Why environments of earlier episodes could not be closed."""
    waited: float = 0.0
    """Seconds that the episode waited for its environment."""
    transcript: str | None = None
    """All turns, with what the environment gave."""


@dataclass
class Start:
    """What an episode starts from: an example and a seed, the same for all samples of a prompt.

    `replay` are the turns of an episode that is continued from inside its turn number `len(replay)`: the environment
    plays them again. `prefix` are that episode's tokens, of which the last `turn_prefix` belong to the unfinished turn.
    """

    example: dict[str, Any]
    seed: int
    prompt_index: int
    sample_index: int = 0
    record: bool = False
    keep_hidden: bool = False
    replay: Sequence[Turn] = ()
    prefix: Sequence[int] = ()
    turn_prefix: int = 0


@dataclass
class Live:
    """An episode that is being played."""

    key: int
    start: Start
    sampling: Sampling
    sparsity: Sparsity
    environment: Environment | None = None
    starting: bool = True
    """Whether the environment is yet to be reset, or its turns to be replayed."""
    over: bool = False
    messages: Messages = field(default_factory=list)
    """The conversation up to the policy's present turn."""
    prompt_ids: list[int] = field(default_factory=list)
    rollout: Rollout | None = None
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    waited: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + (len(self.rollout) if self.rollout else 0)


class Episodes:
    """Plays episodes of one environment on an engine, which the caller steps.

    `begin` one at any time, `answer` between two steps of the engine, and `take` what the engine has finished; `ended`
    are the episodes that are over.
    """

    def __init__(self, settings: EnvironmentSettings, build: Build, engine: Engine, conversation: Conversation) -> None:
        self.settings, self.build, self.engine, self.conversation = settings, build, engine, conversation
        self.calls = Calls(settings.timeout)
        self.live: dict[int, Live] = {}
        self.serving: dict[int, Live] = {}
        """Episodes that the engine works on, by request id."""
        self.ended: list[tuple[int, Episode]] = []
        self.unclosed: list[str] = []
        """Why environments could not be closed, until an episode that ends takes it along."""
        self._closing = threading.Lock()

    def begin(self, key: int, start: Start, sampling: Sampling, sparsity: Sparsity) -> None:
        """Start an episode, which ends with this key. `sampling` limits every turn; its `n` is not used."""
        self.live[key] = live = Live(key, start, replace(sampling, n=1), sparsity)
        self.calls.start(live, self._begin, live)

    def answer(self, wait: float) -> int:
        """Pass on what environments have answered; waits at most so many seconds for the first one, or the first
        timeout. Returns the number of answers."""
        outcomes = self.calls.poll(wait, grace=GRACE)
        for outcome in outcomes:
            self._answered(outcome)
        return len(outcomes)

    def take(self, rollout: Rollout) -> bool:
        """Continue the episode that a finished rollout belongs to; False if there is none."""
        live = self.serving.pop(rollout.request_id, None)
        if live is not None:
            self._sampled(live, rollout)
        return live is not None

    def abandon(self) -> None:
        """Give up all episodes, close their environments, and leave nothing behind in the engine."""
        self.calls.forget()
        for request_id in self.serving:
            self.engine.abort(request_id)
        for live in self.live.values():
            self._close(live)
        self.live.clear()
        self.serving.clear()
        self.ended.clear()
        self.calls.finish(CLOSING)

    # -- in another thread --------------------------------------------------------------------------------

    def _begin(self, live: Live) -> tuple[Messages, float]:
        """Build and reset an environment, and play the turns of `Start.replay` again; returns the prompt and the
        rewards so far. Closes the environment if the episode was given up meanwhile."""
        try:
            live.environment = self.build()
            return self._reset(live.environment, live.start)
        finally:
            with self._closing:
                live.starting, over = False, live.over
            if over and (close := getattr(live.environment, "close", None)) is not None:
                self.calls.resolve(close())

    def _reset(self, environment: Environment, start: Start) -> tuple[Messages, float]:
        prompt, total = as_messages(self.calls.resolve(environment.reset(dict(start.example), start.seed))), 0.0
        for number, turn in enumerate(start.replay, 1):
            messages, reward, done = checked(self.calls.resolve(environment.step(turn.completion)))
            total += reward
            require(
                not done and messages == turn.messages,
                f"turn {number} was answered differently when it was replayed, so it is not replayable.",
            )
        return prompt, total

    # -- in the engine's thread ---------------------------------------------------------------------------

    def _answered(self, outcome: Outcome) -> None:
        """An environment has answered, failed, or was given up."""
        live: Live | None = outcome.key
        if live is None:  # a call of close()
            self.unclosed += [] if outcome.failure is None else [outcome.failure]
            return
        live.waited += outcome.seconds
        if outcome.failure is not None:
            self._end(live, "error", outcome.failure)
            return
        try:
            if live.rollout is None:
                self._submit(live, *outcome.value)
            else:
                self._continue(live, *checked(outcome.value))
        except Exception as error:  # what the environment returned cannot be used, or cannot be rendered
            self._end(live, "error", with_place(error))

    def _submit(self, live: Live, messages: Messages, reward: float) -> None:
        """Start the policy's first turn, or the one that a replay has led to."""
        start, most = live.start, self.settings.max_tokens
        live.messages, live.reward = messages, reward
        live.turns = [replace(turn) for turn in start.replay]
        prompt = self.conversation.prompt(messages, getattr(live.environment, "tools", None))
        for turn in start.replay:
            live.messages = [*live.messages, {"role": "assistant", "content": turn.completion}, *turn.messages]
        live.prompt_ids = [*prompt, *start.prefix]
        require(len(live.prompt_ids) < most, f"a prompt of {len(prompt)} tokens; environment.max_tokens is {most}.")
        [request] = self.engine.requests(
            [live.prompt_ids],
            self._turn_sampling(live, most - len(live.prompt_ids), start.turn_prefix),
            live.sparsity,
            record=start.record,
            keep_hidden=int(start.keep_hidden),
            indices=[start.prompt_index],
            session=True,
        )
        request.key = rollout_key(live.sampling.seed, start.prompt_index, start.sample_index)
        if request.stop_strings and start.turn_prefix:
            request.stop_strings = replace(request.stop_strings, before=tuple(start.prefix[-start.turn_prefix :]))
        live.turns.append(Turn(-start.turn_prefix, ""))
        self.serving[self.engine.submit(request)] = live

    def _turn_sampling(self, live: Live, left: int, used: int = 0) -> Sampling:
        return replace(live.sampling, max_new_tokens=min(live.sampling.max_new_tokens - used, left))

    def _sampled(self, live: Live, rollout: Rollout) -> None:
        """The policy has finished a turn."""
        live.rollout = rollout
        if rollout.finish not in ("stop", "length") or live.environment is None:
            self._end(live, rollout.finish)
            return
        turn, tokens = live.turns[-1], rollout.token_ids
        if turn.start < 0:
            tokens = [*live.start.prefix[turn.start :], *tokens]
        stops = resolve_stops(live.sampling.stop, self.engine.tokenizer)[1]
        turn.completion = answer_text(tokens[max(turn.start, 0) :], rollout.finish, stops, self.engine.tokenizer)
        self.calls.start(live, live.environment.step, turn.completion)

    def _continue(self, live: Live, messages: Messages, reward: float, done: bool) -> None:
        """The environment has answered a turn: end the episode, or start the next turn."""
        rollout, turn = live.rollout, live.turns[-1]
        assert rollout is not None
        assert rollout.session is not None
        live.reward += reward
        if done or rollout.finish == "length":
            self._end(live, rollout.finish)
            return
        if len(live.turns) >= self.settings.max_turns:
            self._end(live, "length")
            return
        require(len(messages) > 0, "it returned no message, and the episode is not done.")
        tools = getattr(live.environment, "tools", None)
        given = self.conversation.between(live.messages, messages, rollout.token_ids[-1], tools)
        require(len(given) > 0, "its messages have no tokens.")
        left = self.settings.max_tokens - live.tokens - len(given)
        if left < 1:
            self._end(live, "length")
            return
        self.serving[self.engine.extend(rollout.session, given, self._turn_sampling(live, left))] = live
        turn.messages = messages
        live.messages = [*live.messages, {"role": "assistant", "content": turn.completion}, *messages]
        live.turns.append(Turn(len(rollout) + len(given), ""))

    def _end(self, live: Live, finish: Finish, failure: str | None = None) -> None:
        """Release the episode's KV, close its environment and keep its result."""
        self._close(live)
        del self.live[live.key]
        start, rollout = live.start, live.rollout
        if rollout is None:
            rollout = Rollout(live.prompt_ids or [0], [], torch.empty(0), finish, sampling=live.sampling)
            rollout.sparsity = live.sparsity
        values = {each.name: getattr(rollout, each.name) for each in fields(Rollout)}
        unclosed, self.unclosed = self.unclosed, []
        values |= {
            "finish": finish,
            "session": None,
            "prompt_index": start.prompt_index,
            "sample_index": start.sample_index,
            "sampling": live.sampling,
            "text": live.turns[-1].completion if live.turns else "",
            "reward": live.reward,
            "unclosed": unclosed,
        }
        transcript = self.conversation.tokenizer.decode([*start.prefix, *rollout.token_ids], skip_special_tokens=False)
        episode = Episode(**values, turns=live.turns, failure=failure, waited=live.waited, transcript=transcript)
        self.ended.append((live.key, episode))

    def _close(self, live: Live) -> None:
        """Close the episode's session, and its environment; one that is still being reset is closed by `_begin`."""
        if live.rollout is not None and live.rollout.session is not None:
            self.engine.close(live.rollout.session)
        with self._closing:
            live.over, starting = True, live.starting
        if not starting and (close := getattr(live.environment, "close", None)) is not None:
            self.calls.start(None, close)


def checked(answer: Any) -> tuple[Messages, float, bool]:
    """What `step` returned, with the types that the protocol names."""
    try:
        messages, reward, done = answer
        reward = float(reward)
    except (TypeError, ValueError):
        raise SettingError(
            f"step() returned {answer!r:.80} instead of messages, a reward and whether it is done"
        ) from None
    require(math.isfinite(reward), f"its reward is {reward}.")
    return as_messages(messages or []), reward, bool(done)

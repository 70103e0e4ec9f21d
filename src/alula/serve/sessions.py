"""Sessions of HTTP clients: which kept rollout continues a token history."""

from dataclasses import dataclass

from alula.engine.engine import Engine
from alula.engine.rollout import Rollout
from alula.engine.sequence import Request

MOST_SESSIONS = 4096


@dataclass
class KeptTurn:
    """The last finished turn of a client's session."""

    session: int
    """The engine's id."""
    tokens: list[int]
    """Prompt, sampled and given tokens of all turns."""
    request: Request
    """The first turn's request: a session keeps its policy, its seed and its kind of sampling."""

    def given(self, request: Request, seeded: bool) -> list[int] | None:
        """The tokens that `request` adds to this history; None if it does not extend it exactly, or asks for something
        else. `seeded`: whether the client chose its seed."""
        history, prompt, first = self.tokens, request.prompt_ids, self.request
        same = (
            request.sparsity == first.sparsity
            and (not seeded or request.sampling.seed == first.sampling.seed)
            and request.sampling.filtered == first.sampling.filtered
            and request.sampling.topk_logprobs == first.sampling.topk_logprobs
        )
        if not same or len(prompt) <= len(history) or prompt[: len(history)] != history:
            return None
        return prompt[len(history) :]


class Sessions:
    """Kept turns by the client's session id. Only the engine's thread uses it.

    A running turn is not in here. Two requests of one session at a time do not share a cache: the second one starts
    anew, and the turn that ends last is kept.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._kept: dict[str, KeptTurn] = {}

    def take(self, name: str) -> KeptTurn | None:
        """Remove and return the kept turn of a session, if the engine still has it."""
        turn = self._kept.pop(name, None)
        return turn if turn is not None and turn.session in self.engine.sessions else None

    def keep(self, name: str, turn: KeptTurn) -> None:
        self.close(name)
        self._kept[name] = turn
        if len(self._kept) > MOST_SESSIONS:
            self.close(next(iter(self._kept)))

    def keep_rollout(self, name: str, rollout: Rollout, request: Request) -> None:
        """Keep a turn that ended; an aborted one has no session any more."""
        if rollout.session is not None:
            self.keep(name, KeptTurn(rollout.session, rollout.prompt_ids + rollout.token_ids, request))

    def close(self, name: str) -> bool:
        """Release the KV of a session; returns whether there was one."""
        turn = self.take(name)
        if turn is not None:
            self.engine.close(turn.session)
        return turn is not None

    def forget_expired(self) -> None:
        """Drop the histories of sessions that the engine has closed."""
        if len(self._kept) > len(self.engine.sessions):
            self._kept = {name: turn for name, turn in self._kept.items() if turn.session in self.engine.sessions}

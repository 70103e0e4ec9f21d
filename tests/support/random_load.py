"""An engine under random load: arrivals, kinds, aborts, pauses, sleeps, weight updates, sessions and swaps.

Every rollout is compared with the same request run alone, with the weights that sampled each of its tokens.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from alula import Engine, Sampling, Sparsity
from alula.engine import engine_core as engine_module
from alula.engine.sequence import Sequence
from alula.models.geometry import Geometry
from alula.models.load import LoadedModel
from fused import fuse


@dataclass
class Load:
    """What is drawn: the most of everything, and the engine's size."""

    policies: list[Sparsity]
    page: int
    pages: tuple[int, int]
    rows: tuple[int, ...] = (1, 3, 8)
    arrivals: int = 4
    samples: int = 2
    prompt: int = 14
    new: int = 20
    given: int = 9
    vocabulary: tuple[int, int] = (2, 95)
    stop: tuple[int, ...] = (3, 7, 11, 19, 40, 61)
    last_turn: int = 25
    """By then aborts, pauses, sleeps and updates have come."""


class Versions:
    """A copy of a model with two sets of weights, of odd and of even versions; they differ in parameters whose name
    contains `changed`. `fused`: decode steps in few kernels."""

    def __init__(self, loaded: LoadedModel, changed: str = "", fused: bool = False) -> None:
        self.fused = fused
        self.loaded = LoadedModel(copy.deepcopy(loaded.model), None, "own", (1,))
        even = {name: p.detach().clone() for name, p in self.loaded.model.named_parameters() if changed in name}
        torch.manual_seed(5)
        self.weights = [even, {name: p + 0.05 * torch.randn_like(p) for name, p in even.items()}]

    def install(self, engine: Engine, version: int) -> None:
        engine.update_weights(self.weights[version % 2].items(), version=version)

    def engine(self, **options: Any) -> Engine:
        """An engine with the weights of version 0."""
        engine = Engine(self.loaded, **options)
        if self.fused:
            fuse(engine)
        self.install(engine, 0)
        return engine


class Alone:
    """Runs one request by itself, with the weights that sampled each token of another engine's rollout."""

    def __init__(self, versions: Versions, engine: Engine, monkeypatch: Any) -> None:
        self.engine = engine
        decode, prefill, extend = engine.runner.decode, engine_module.prefill, engine_module.extend

        def at(index):
            version = next((v for end, v in self.ends if index < end), self.ends[-1][1])
            if version != engine.policy_version:
                versions.install(engine, version)

        def decode_alone(chunk, version):
            at(chunk.parts[0].position - chunk.parts[0].sequence.prompt_len + 1)
            return decode(chunk, version)

        def prefill_alone(runner, groups, version):
            at(0)
            return prefill(runner, groups, version)

        def extend_alone(runner, extension, version):
            part = extension.parts[0]
            at(part.position + part.steps - part.sequence.prompt_len)
            return extend(runner, extension, version)

        monkeypatch.setattr(engine.runner, "decode", decode_alone)
        monkeypatch.setattr(engine_module, "prefill", prefill_alone)
        monkeypatch.setattr(engine_module, "extend", extend_alone)

    def run(self, request, rollout, given):
        """The rollout with the same sampling key, and the same given tokens after each turn."""
        self.ends, total = [], 0
        for span in rollout.spans:
            total += span.tokens
            if span.version is not None:
                self.ends.append((total, span.version))
        self.ends = self.ends or [(1, 0)]
        (mine,) = self.engine.requests(
            [request.prompt_ids], replace(rollout.sampling, n=1), request.sparsity, record=True, session=bool(given)
        )
        mine.key, mine.stop = Sequence(request, rollout.sample_index).key, request.stop
        self.engine.submit(mine)
        (result,) = self.engine.drain()
        for tokens in given:
            self.engine.extend(result.session, tokens)
            (result,) = self.engine.drain()
        if result.session is not None:
            self.engine.close(result.session)
        return result


def arrivals_of(data, engine, load):
    """(turn, request, given tokens of its later turns) of every request."""
    arrivals = []
    token = st.integers(*load.vocabulary)
    for i in range(data.draw(st.integers(1, load.arrivals))):
        policy = data.draw(st.sampled_from(load.policies))
        turns = data.draw(st.sampled_from([0, 0, 1, 2]))
        sampling = Sampling(
            n=data.draw(st.integers(1, load.samples)),
            max_new_tokens=data.draw(st.integers(1, load.new)),
            seed=i,
            stop=load.stop if data.draw(st.booleans()) else (),
            ignore_eos=True,
        )
        prompt = data.draw(st.lists(token, min_size=1, max_size=load.prompt))
        (request,) = engine.requests([prompt], sampling, policy, record=True, indices=[i], session=bool(turns))
        given = [data.draw(st.lists(token, min_size=1, max_size=load.given)) for _ in range(turns)]
        arrivals.append((data.draw(st.integers(0, 12)), request, given))
    return arrivals


def serve(data, engine, load, arrivals, versions, updates):
    """The final rollout of every session and request, and the given tokens that it has: (request, rollout, given)."""
    moments = st.sets(st.integers(1, load.last_turn), max_size=2)
    aborts = data.draw(st.dictionaries(st.integers(0, 3), st.integers(1, 15), max_size=1))
    changes = data.draw(st.sets(st.integers(1, load.last_turn), max_size=3)) if updates else set()
    sleeps, pauses = data.draw(moments), data.draw(moments)
    finals, taken, arrival_of = [], {}, {}
    waiting, turn = list(arrivals), 0
    while waiting or engine._live or engine._finished:
        assert turn < 2000, "somebody starves"
        for arrival in [a for a in waiting if a[0] <= turn]:
            waiting.remove(arrival)
            arrival_of[engine.submit(arrival[1])] = arrival
        for index, moment in aborts.items():
            if moment == turn and index < len(arrivals):
                engine.abort(arrivals[index][1].id)
        if turn in pauses:
            engine.pause()
            engine.step()
            engine.resume()
        if turn in changes:
            versions.install(engine, engine.policy_version + 1)
        if turn in sleeps:
            engine.sleep()
            engine.wake()
        engine.step()
        for rollout in engine.finished():
            arrival = arrival_of[rollout.request_id]
            _, request, given = arrival
            done = taken.setdefault((request.id, rollout.sample_index), [])
            if len(done) < len(given) and rollout.session is not None:
                done.append(given[len(done)])
                arrival_of[engine.extend(rollout.session, done[-1])] = arrival
            else:
                finals.append((request, rollout, done))
                if rollout.session is not None:
                    engine.close(rollout.session)
        turn += 1
    return finals


def assert_as_alone(data, load, versions, monkeypatch):
    """Serve a random load; every result is bit for bit that of the request alone, and no page is lost."""
    rows, updates = data.draw(st.sampled_from(load.rows)), data.draw(st.booleans())
    layout = {"page": load.page, "max_rows": rows, "buckets": (rows,)}
    page_bytes = load.page * Geometry.of(versions.loaded.model).kv_token_bytes
    engine = versions.engine(
        kv_memory=data.draw(st.integers(*load.pages)) * page_bytes,
        lookahead=data.draw(st.integers(1, 5)),
        # KV computed again after an update is that of other weights, so restarts and updates are not mixed
        swap_memory="1GiB" if updates else data.draw(st.sampled_from([0, 5 * page_bytes, 2**30])),
        **layout,
    )
    engine._in_flight = data.draw(st.integers(0, 1))
    arrivals = arrivals_of(data, engine, load)
    finals = serve(data, engine, load, arrivals, versions, updates)
    assert engine.pool.in_use == 0
    assert engine._scheduler.swap_used == 0
    assert not engine.sessions
    assert len(finals) == sum(request.sampling.n for _, request, _ in arrivals)
    alone = Alone(versions, versions.engine(kv_memory=8 * load.pages[1] * page_bytes, **layout), monkeypatch)
    for request, rollout, given in finals:
        if updates and rollout.kv.restarts:  # a turn that ended before it had a row: computed again by later weights
            continue
        expected = alone.run(request, rollout, given)
        if rollout.finish == "aborted":
            assert rollout.token_ids == expected.token_ids[: len(rollout)]
            continue
        assert rollout.token_ids == expected.token_ids
        assert torch.equal(rollout.logprobs.nan_to_num(), expected.logprobs.nan_to_num())
        assert rollout.finish == expected.finish
        assert (rollout.history is None) == (expected.history is None)
        assert rollout.history is None or torch.equal(rollout.history, expected.history)

"""A whole RL step as `alula train` runs it, with given lengths of the answers, and what each part of it takes."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from alula import Engine, Sampling
from alula.bench.ceilings import Ceilings
from alula.bench.decode import weight_bytes
from alula.config.load import read_tree
from alula.config.run import RunConfig
from alula.distributed import init_world
from alula.engine.rollout import Rollout
from alula.engine.schedule_plan import Part
from alula.engine.sequence import Request
from alula.heap import frozen_heap
from alula.models.load import load_model
from alula.ops.sequence_attention import padded
from alula.rollouts.build import build_engine
from alula.trainer.batch import RolloutBatch
from alula.trainer.build import build_learner
from alula.trainer.learner_fit import available, choose, with_choice
from alula.trainer.memory_plan import plan_memory
from alula.trainer.update import Updater

GROUP = 8
"""Rollouts of a prompt."""


@dataclass(frozen=True)
class Workload:
    """Rollouts of one step: `lengths` are the answers' tokens, those of one prompt adjacent."""

    model: str
    prompts: list[list[int]]
    lengths: list[int]
    most: int
    updates: int
    kv_memory: str | None = None
    device: str = "cuda"

    def config(self, sparsity: str) -> RunConfig:
        """The settings of a run with these rollouts, and the defaults for all else."""
        tree: dict[str, Any] = {
            "out": "runs/none",
            "model": {"source": f"shape:{self.model}", "device": self.device},
            "data": {"source": "gsm8k", "max_prompt_tokens": max(map(len, self.prompts))},
            "rewards": {"use": "math"},
            "sparsity": sparsity,
            "sampling": {"prompts": len(self.prompts), "n": GROUP, "max_new_tokens": self.most},
            "engine": {"kv_memory": self.kv_memory, "max_rows": len(self.lengths)},
            "learner": {"updates": self.updates},
            "objective": {"correction": "none" if sparsity == "dense" else "sparse-rl"},
        }
        return read_tree(tree)


class Step:
    """Engine and learner of a run, with the learner's settings chosen by what fits."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        config, world = workload.config("dense"), init_world(workload.device)
        loaded = load_model(config.model.source, device=world.device)
        if world.device.type == "cuda":
            config = with_choice(config, choose(config.learner, plan_memory(config), available(world.device)))
        self.settings = config.learner
        self.learner, for_engine, _ = build_learner(config, loaded, world)
        longest = max(map(len, workload.prompts)) + workload.most
        self.engine = build_engine(config, for_engine, longest)

    def warm_up(self, sparsity: str, longest: int = 600) -> None:
        """Compile all kernels and the learner on short answers, and capture the graphs of the long ones.

        The learner sees a few groups, since its shapes are dynamic, and answers of each padded length, for which
        attention plans its kernels."""
        lengths = self.workload.lengths
        rollouts = generate(self.engine, self.requests(sparsity, [min(n, longest) for n in lengths]))
        few = max(self.workload.updates, len(self.workload.prompts) // 8) * GROUP
        self.learn(Phases(self.engine.device), rollouts[:few], sparsity)
        prompt = self.workload.prompts[0]
        kinds = {padded(len(prompt) + n): n for n in lengths}.values()
        long = [SimpleNamespace(prompt_ids=prompt, token_ids=[0] * n) for n in kinds]
        with self.engine.asleep():
            self.learner.score(long)
            self.learner.update(long, lambda logprobs, entropy, batch: (logprobs.sum() * 1e-9, {}))
        self._capture(sparsity)
        gc.collect()

    def _capture(self, sparsity: str) -> None:
        """Capture the decode steps that the workload will replay, as far as lengths alone tell."""
        runner, policy = self.engine.runner, self.workload.config(sparsity).sparsity
        state, prompt = runner.batches[self.requests(sparsity)[0].kind], max(map(len, self.workload.prompts))
        pool = self.engine.pool.usable * self.engine.page
        wanted = set()
        for done in range(0, self.workload.most, self.engine.lookahead):
            held = prompt + done + self.engine.lookahead
            if policy.evict is not None and isinstance(policy.evict.budget, int):
                held = min(held, max(prompt, policy.evict.budget + policy.evict.buffer))
            rows = max(1, sum(n > done for n in self.workload.lengths))
            for running in {rows, min(rows, max(1, pool // held))}:  # all that are left, or those that the pool holds
                wanted.add(runner.step_size(state, range(running), held))
        with torch.inference_mode():
            for size in sorted(wanted):
                runner.graph_for(state, size)

    def requests(self, sparsity: str, lengths: list[int] | None = None) -> list[Request]:
        """Rollouts of one prompt and one length share a request."""
        lengths, policy = lengths or self.workload.lengths, self.workload.config(sparsity).sparsity
        requests, first = [], 0
        while first < len(lengths):
            last = first + 1
            while last % GROUP and lengths[last] == lengths[first]:
                last += 1
            sampling = Sampling(n=last - first, max_new_tokens=lengths[first], ignore_eos=True)
            prompt = self.workload.prompts[first // GROUP]
            request_id = self.engine.inputs.next_id()
            requests.append(Request(request_id, prompt, sampling, policy, frozenset(), first))
            first = last
        return requests

    def run(self, sparsity: str, ceilings: Ceilings) -> dict:
        """One step, timed: rollouts, then the learner's part while the KV pool is lent to it."""
        engine, workload = self.engine, self.workload
        phases, requests = Phases(engine.device), self.requests(sparsity)
        if engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        engine.pool.peak, graphs = 0, len(engine.runner.graphs)
        with frozen_heap():  # as in a run
            with DecodeClock(engine) as clock, phases.phase("rollout"):
                rollouts = generate(engine, requests)
            captured = len(engine.runner.graphs) - graphs
            result, unscored = self.learn(phases, rollouts, sparsity)
        tokens, scored = sum(workload.lengths), phases["score"] + unscored
        return {
            "model": workload.model,
            "sparsity": workload.config(sparsity).sparsity.describe(),
            "rollouts": len(rollouts),
            "prompts": len(workload.prompts),
            "response_tokens": tokens,
            "mean_length": tokens / len(rollouts),
            "most": workload.most,
            "updates": workload.updates,
            "kv_memory": workload.kv_memory,
            "step_s": sum(phases.values()),
            **{f"{name}_s": seconds for name, seconds in phases.items()},
            "strict_score_s": scored,
            "strict_step_s": sum(phases.values()) + unscored,
            **clock.totals(ceilings),
            "graphs_captured": captured,
            "rollout_tokens_per_s": tokens / phases["rollout"],
            "update_of_matrix_rate": result.flops / phases["update"] / ceilings.matrix,
            "skips_scoring": Updater(workload.config(sparsity), self.learner).skip_scoring,
            "learner": {
                "activation_checkpointing": self.settings.checkpoints_activations,
                "token_budget": self.settings.tokens,
            },
            "veto_rate": float(np.mean(result.vetoed)),
            "kv_saved": float(np.mean([r.kv.saved for r in rollouts])),
            "swaps": sum(r.kv.swaps for r in rollouts),
            "restarts": sum(r.kv.restarts for r in rollouts),
            "kv_peak_gib": engine.pool.peak * engine.page * engine.geometry.kv_token_bytes / 2**30,
            "learner_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if engine.device.type == "cuda" else None,
        }

    def learn(self, phases: "Phases", rollouts: list[Rollout], sparsity: str) -> tuple[Any, float]:
        """Score and update as the trainer does; also returns the seconds of the scoring that was skipped.

        Half of each group is rewarded, so that every rollout has an advantage."""
        updater = Updater(self.workload.config(sparsity), self.learner)
        rng = np.random.default_rng(0)
        rewards = [float(x) for _ in range(len(rollouts) // GROUP) for x in rng.permutation(GROUP) % 2]
        batch = RolloutBatch(rollouts, [], GROUP, rewards=rewards)
        with phases.phase("sleep"):
            self.engine.sleep()
        with phases.phase("score"):
            updater.score(batch)
        skipped = [r for r, logprobs in zip(rollouts, batch.dense) if not len(logprobs)]
        with phases.phase("update"):
            minibatch = updater.assign_minibatches(batch)
            corrected = updater.correct(batch, minibatch)
            result = updater.update(batch, minibatch, corrected, updater.advantages(batch, corrected))
        apart = Phases(self.engine.device)
        with apart.phase("score"):
            self.learner.score(skipped)
        with phases.phase("wake"):
            self.engine.wake()
            self.engine.policy_version += 1  # the optimizer wrote into the engine's own parameters
        return result, apart["score"]


def generate(engine: Engine, requests: list[Request]) -> list[Rollout]:
    return sorted(engine.stream(requests), key=lambda r: (r.prompt_index, r.sample_index))


class Phases(dict[str, float]):
    """Seconds of each part of a step."""

    def __init__(self, device: torch.device) -> None:
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.wait()
        start = time.perf_counter()
        yield
        self.wait()
        self[name] = self.get(name, 0.0) + time.perf_counter() - start


class DecodeClock:
    """Device time of an engine's decode steps and evictions, by events that are read at the end."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.cuda = engine, engine.device.type == "cuda"
        self.spans: dict[str, list[tuple[Any, Any]]] = {"decode": [], "evict": []}
        self.chunks: list[tuple[int, list[Part]]] = []

    def __enter__(self) -> "DecodeClock":
        runner = self.engine.runner
        decode, evict, graph_for, step = runner.decode, runner.evict, runner.graph_for, runner.step
        clock = self

        class Replays:
            """A captured step. Its replays between two evictions are timed together."""

            def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
                self.graph = graph

            def replay(self) -> None:
                clock.begin("decode")
                self.graph.replay()

        def timed_decode(chunk: Any, version: int = 0) -> Any:
            clock.chunks.append((chunk.steps, chunk.parts))
            decoded = decode(chunk, version)
            clock.end("decode")
            return decoded

        def timed_evict(*arguments: Any) -> Any:
            clock.end("decode")
            clock.begin("evict")
            kept = evict(*arguments)
            clock.end("evict")
            return kept

        def timed_step(*arguments: Any) -> Any:
            clock.begin("decode")
            return step(*arguments)

        def watched_graph(*arguments: Any) -> Any:
            graph = graph_for(*arguments)
            return None if graph is None else Replays(graph)

        self.open: dict[str, Any] = {}
        timed = {"decode": timed_decode, "evict": timed_evict, "graph_for": watched_graph}
        if not runner.use_graphs:
            timed["step"] = timed_step
        self.restore = [partial(delattr, runner, name) for name in timed]
        for name, function in timed.items():
            setattr(runner, name, function)
        return self

    def __exit__(self, *_: object) -> None:
        for restore in self.restore:
            restore()

    def begin(self, name: str) -> None:
        if name not in self.open:
            self.open[name] = self.now()

    def end(self, name: str) -> None:
        if name in self.open:
            self.spans[name].append((self.open.pop(name), self.now()))

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def totals(self, ceilings: Ceilings) -> dict[str, float | int]:
        """Seconds of decoding and evicting, and the floor of the decode steps: the time to read weights and KV."""
        seconds = {
            name: sum(a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in spans)
            for name, spans in self.spans.items()
        }
        steps = sum(count for count, _ in self.chunks)
        segments = [s for _, parts in self.chunks for part in parts for s in part.segments]
        held = sum(s.steps * s.kv_len + s.steps * (s.steps + 1) // 2 for s in segments)
        read = steps * weight_bytes(self.engine) + held * self.engine.geometry.kv_token_bytes
        return {
            "decode_s": seconds["decode"],
            "evict_s": seconds["evict"],
            "floor_s": read / ceilings.bandwidth,
            "decode_steps": steps,
            "mean_rows": sum(s.steps for s in segments) / max(1, steps),
        }

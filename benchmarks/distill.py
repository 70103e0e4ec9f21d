"""DistillSparse on a real model: `python benchmarks/distill.py --data-dir DATA --out results/distill-h200.json`.

Sections, each alone with `--only agreement,acceptance,overhead,decode`; results are merged into the output file.

    agreement   log-probs of the learner's sparse forward against the engine's, with and without φ
    acceptance  tail and mean of acceptance on held-out prompts before and after `--seconds` of distillation, for two
                budgets of a selector and of an evictor and several seeds; then both policies at a ladder of budgets,
                with the rollout speed of each: the largest sparsity that meets a threshold before and after
    overhead    a distillation step against a learner update on the same rollouts, by fraction and teacher
    decode      decode steps with φ merged against those without
"""

import argparse
import gc
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.bench import StepBench
from alula.data import Dataset, load, prepare
from alula.distill.adapter import fresh
from alula.distill.alone import Rollouts, asleep, distill_alone, generate
from alula.distill.config import DistillConfig
from alula.distill.distiller import Distiller
from alula.distill.measure import Acceptance
from alula.engine.rollout import Rollout
from alula.model import LoadedModel, load_model
from alula.rl.correction import Correction
from alula.rl.learner import Learner
from alula.rl.learner_config import LearnerConfig
from alula.rl.losses import Loss, divisors, policy_loss

Row = dict[str, Any]
THRESHOLDS = (0.70, 0.75, 0.80, 0.83, 0.86, 0.88, 0.90, 0.92)


def select(budget: int) -> Sparsity:
    return Sparsity(select=Select("block-topk", budget, block=16, dense_layers=2))


def evict(budget: int) -> Sparsity:
    return Sparsity(evict=Evict("rkv", budget, buffer=32, window=8, sinks=4))


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.loaded: LoadedModel = load_model(options.model, device=options.device, dtype=options.dtype)
        data = load(options.data, split="train", data_dir=options.data_dir, answer="")
        self.data: Dataset = prepare(data, self.loaded.tokenizer, max_prompt_tokens=512)
        self.training, held_out = self.data.split(options.held_out, seed=0)
        self.held_out = [list(example.prompt_ids or ()) for example in held_out]
        self.rollouts = Rollouts(prompts=options.prompts, samples=1, max_new_tokens=options.tokens, temperature=1.0)

    def engine(self, adapter: Any = None) -> Engine:
        o = self.options
        return Engine(
            self.loaded, page=16, kv_memory=o.kv_memory, max_rows=o.rows, max_length=o.tokens + 1024,
            sparse_adapter=adapter,
        )  # fmt: skip

    def config(self, **settings: Any) -> DistillConfig:
        o = self.options
        settings = {"rank": o.rank, "alpha": 2.0 * o.rank, "lr": o.lr, "minibatches": 4, "loss": "divergence",
                    "token_budget": o.token_budget} | settings  # fmt: skip
        return DistillConfig(**settings)

    def seconds(self, work: Any) -> float:
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.options.device == "cuda":
            torch.cuda.synchronize()

    # -- sections -----------------------------------------------------------------------------------------

    def agreement(self) -> Iterator[Row]:
        prompts = self.held_out[: min(32, len(self.held_out))]
        trained = fresh(self.loaded.model, self.options.rank, 2.0 * self.options.rank, ["all"], 0)
        for a, b in trained.weights.values():  # the size of a trained update: about a hundredth of a weight
            b.copy_(0.01 * torch.randn_like(b) / a.shape[0])
        for adapter in (None, trained):
            engine, distiller = self.engine(adapter), Distiller(self.loaded.model, self.config(), adapter=adapter)
            for policy in (select(96), evict(96), Sparsity(evict=Evict("snapkv", 96, buffer=32))):
                made = generate(engine, prompts, policy, self.rollouts, 1, seed=1)
                with asleep(engine):
                    scores = distiller.score(made)
                gap = torch.cat([s.cpu() - _logprobs(r) for s, r in zip(scores, made)]).abs()
                yield {"kind": "agreement", "dtype": str(self.loaded.model.dtype), "adapter": adapter is not None,
                       "sparsity": policy.describe(), "tokens": len(gap), "mean": gap.mean().item(),
                       "p99": gap.quantile(0.99).item(), "most": gap.max().item()}  # fmt: skip
            del engine, distiller
            release()

    def acceptance(self) -> Iterator[Row]:
        kinds = {"select": (select, self.options.select_budgets), "evict": (evict, self.options.evict_budgets)}
        for kind in self.options.kinds.split(","):
            make, budgets = kinds[kind]
            self._distil(make, budgets[0], seed=99, ladder=False, limit=1)  # compiles what the clock should not see
            for budget in budgets:
                for seed in range(self.options.seeds):
                    yield self._distil(make, budget, seed, ladder=seed == 0)
                    release()

    def _distil(self, make: Any, budget: int, seed: int, ladder: bool, limit: int | None = None) -> Row:
        """`--seconds` of distillation, or `limit` steps."""
        policy = make(budget)
        distiller = Distiller(self.loaded.model, self.config(seed=seed))
        engine = self.engine(distiller.adapter())
        ladders = {0: self._ladder(engine, make)} if ladder else {}
        before = self._measured(engine, policy, seed)
        losses: list[float] = []
        steps, started = 0, time.perf_counter()
        rollouts = replace(self.rollouts, seed=1000 * (seed + 1))
        while time.perf_counter() - started < self.options.seconds and steps != limit:
            round_ = replace(rollouts, seed=rollouts.seed + steps)
            distill_alone(engine, distiller, policy, self.training, 1, round_,
                          lambda _, row: losses.append(row["distill/kl"]))  # fmt: skip
            steps += 1
        spent = time.perf_counter() - started
        after = self._measured(engine, policy, seed)
        row: Row = {"kind": "acceptance", "sparsity": policy.describe(), "budget": budget, "seed": seed}
        row |= {"steps": steps, "seconds": spent, "kl_by_step": losses}
        row |= {"before": before.metrics(), "after": after.metrics()}
        if ladder:
            ladders[1] = self._ladder(engine, make)
            row["ladder"] = {"before": ladders[0], "after": ladders[1]}
            row["sparsest"] = [sparsest(tau, ladders[0], ladders[1]) for tau in THRESHOLDS]
        return row

    def _measured(self, engine: Engine, policy: Sparsity, seed: int) -> Acceptance:
        """The engine's own acceptance: forced decoding against the dense pass."""
        made = generate(engine, self.held_out, policy, self.rollouts, 1, seed=-1 - seed)
        return Acceptance.of(made, engine.acceptance(made, policy), [torch.zeros(1)])

    def _ladder(self, engine: Engine, make: Any) -> list[Row]:
        """Acceptance and rollout speed at every budget, on rollouts of its own."""
        rows = []
        for budget in self.options.ladder:
            policy = make(budget)
            found = self._measured(engine, policy, 0)
            prompts = (self.held_out * self.options.rows)[: self.options.rows]
            sampling = Sampling(max_new_tokens=self.options.speed_tokens, ignore_eos=True, seed=5)
            engine.generate(prompts, replace(sampling, max_new_tokens=32), policy)
            seconds = self.seconds(lambda p=policy, s=sampling, q=prompts: engine.generate(q, s, p))
            speed = self.options.rows * self.options.speed_tokens / seconds
            rows.append({"budget": budget, "tail": found.tail, "mean": found.mean, "tokens_per_s": speed})
        return rows

    def overhead(self) -> Iterator[Row]:
        """On rollouts of the engine, ignoring the end of a text so that lengths are those asked for."""
        for policy in (select(256), evict(256)):
            base = Distiller(self.loaded.model, self.config())
            engine = self.engine(base.adapter())
            prompts = self.held_out[: self.options.overhead_prompts]
            sampling = Sampling(n=4, max_new_tokens=self.options.overhead_tokens, ignore_eos=True, seed=3)
            made = engine.generate(prompts, sampling, policy, record=policy.evict is not None)
            engine.sleep()
            update = self._update_seconds(made)
            base_row = {"kind": "overhead", "sparsity": policy.describe(), "rollouts": len(made),
                        "tokens": sum(len(r.prompt_ids) + len(r) for r in made), "update_s": update}  # fmt: skip
            for settings in (
                {"divergence": "kl", "teacher": "after"},
                {"divergence": "topk-kl", "teacher": "after"},
                {"divergence": "sampled-kl", "teacher": "before"},
            ):
                for fraction in (0.25, 0.5, 1.0):
                    yield base_row | settings | self._step_seconds(made, fraction, settings, update)
            del engine, base
            release()

    def _update_seconds(self, made: list[Rollout]) -> float:
        """One optimizer step of the learner on all rollouts, scoring not included."""
        learner = Learner(self.loaded.model, LearnerConfig(lr=1e-9, token_budget=self.options.token_budget))
        loss, advantages = Loss(), torch.linspace(-1, 1, len(made), device=self.loaded.model.device)
        lengths = torch.tensor([len(r) for r in made], device=advantages.device)
        sequence = torch.repeat_interleave(torch.arange(len(made), device=advantages.device), lengths)
        whole = divisors(loss, Correction.none(), sequence, len(made))
        old = [_logprobs(r) for r in made]

        def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Any) -> Any:
            index = torch.tensor(batch.index, device=logprobs.device)
            return policy_loss(logprobs, batch.flat(old), batch.rows(advantages)[batch.sequence],
                               torch.ones_like(logprobs), batch.sequence, loss, whole.rows(index))  # fmt: skip

        return min(self.seconds(lambda: learner.update(made, loss_fn)) for _ in range(4))

    def _step_seconds(self, made: list[Rollout], fraction: float, settings: Row, update: float) -> Row:
        config = self.config(minibatches=1, loss="both", **settings)
        distiller = Distiller(self.loaded.model, config)
        some = made[: max(1, round(fraction * len(made)))]
        advantages = torch.linspace(-1, 1, len(some))
        teacher = Learner(self.loaded.model).score(some) if settings["teacher"] == "before" else None
        spent = min(self.seconds(lambda: distiller.step(some, advantages, teacher)) for _ in range(4))
        return {"fraction": fraction, "distil_s": spent, "of_update": spent / update}

    def decode(self) -> Iterator[Row]:
        """The same captured step on the dense weights and on the merged ones, in turns."""
        adapter = fresh(self.loaded.model, self.options.rank, 2.0 * self.options.rank, ["all"], 0)
        engine = self.engine(adapter)
        for policy in (select(256), evict(512)):
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(3):
                for adapted in (False, True):
                    bench = StepBench(engine, min(64, self.options.rows), 1024, policy)
                    bench.features = replace(bench.features, adapted=adapted)
                    times[adapted].append(bench.seconds())
            without, with_adapter = min(times[False]), min(times[True])
            yield {"kind": "decode", "sparsity": policy.describe(), "without_ms": without * 1e3,
                   "with_ms": with_adapter * 1e3, "slower": with_adapter / without - 1}  # fmt: skip
        engine.update_sparse_adapter(adapter)
        yield {"kind": "merge", "seconds": self.seconds(lambda: engine.update_sparse_adapter(adapter))}


def sparsest(tau: float, before: list[Row], after: list[Row]) -> Row:
    """The smallest budget of each ladder whose tail meets tau, and its rollout speed."""
    found: Row = {"tau": tau}
    for name, ladder in (("before", before), ("after", after)):
        best = min((row for row in ladder if row["tail"] >= tau), key=lambda row: row["budget"], default=None)
        found |= {f"{name}_budget": best and best["budget"], f"{name}_tokens_per_s": best and best["tokens_per_s"]}
    return found


def _logprobs(rollout: Rollout) -> torch.Tensor:
    assert rollout.logprobs is not None
    return rollout.logprobs


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


SECTIONS = ("agreement", "overhead", "decode", "acceptance")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--model", default=".cache/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--data", default="gsm8k")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--kv-memory", default="20GiB")
    parser.add_argument("--rows", type=int, default=256, help="sequences that decode together")
    parser.add_argument("--prompts", type=int, default=256, help="prompts per distillation step")
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024, help="longest answer")
    parser.add_argument("--kinds", default="select,evict", help="of sparse policy, for acceptance")
    parser.add_argument("--seconds", type=float, default=30, help="of distillation, per budget and seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--select-budgets", type=numbers, default=[64, 128])
    parser.add_argument("--evict-budgets", type=numbers, default=[64, 128])
    parser.add_argument("--ladder", type=numbers, default=[48, 64, 96, 128, 256])
    parser.add_argument("--speed-tokens", type=int, default=1024)
    parser.add_argument("--overhead-prompts", type=int, default=32)
    parser.add_argument("--overhead-tokens", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--token-budget", type=int, default=32768)
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    bench = Bench(options)
    machine = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "only", "data_dir")}
    for name in options.only.split(","):
        start, rows = time.perf_counter(), []
        results[name] = {"machine": machine, "settings": settings, "rows": rows}
        try:
            for row in getattr(bench, name)():
                rows.append(row)
                options.out.write_text(json.dumps(results, indent=1) + "\n")  # after every row: a run may be cut off
                print(json.dumps({k: v for k, v in row.items() if k not in ("kl_by_step", "ladder")}), flush=True)
        except Exception as error:  # one section's failure must not cost the others' results
            rows.append({"error": f"{type(error).__name__}: {error}"})
            traceback.print_exc(limit=8)
        release()
        print(f"[{name}: {time.perf_counter() - start:.0f} s]", flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

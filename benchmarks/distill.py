"""DistillSparse on a real model: `python benchmarks/distill.py --data-dir DATA --out results/distill-h200.json`.

Sections, each alone with `--only agreement,overhead,...`; results are merged into the output file.

    agreement      log-probs of the learner's sparse forward against the engine's, with and without φ
    agreement_float16  the same, of a model in float16
    agreement_residual  the same, of a model whose residual stream is float32
    overhead       a distillation step against a learner update on the same rollouts, by fraction
    decode         decode steps with φ merged against those without
    speed          rollout speed at every budget of the ladder
    select, evict  tail and mean of acceptance on held-out prompts before and after `--steps` of distillation, for
                   two budgets and several seeds, and over a ladder of budgets: which sparsity meets a threshold
                   before and after. These two may share a GPU with other work; the others may not

A bare shape (`--model shape:qwen2.5-1.5b`) has random prompts, which is enough for overhead and decode.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sections import arguments, record, release

from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.bench.decode import StepBench
from alula.data import Dataset, load, prepare
from alula.data.dataset import Example
from alula.distill.distiller import Distiller
from alula.distill.standalone import RolloutOptions, distill_prompts, generate
from alula.engine.rollout import Rollout
from alula.learner.learner import Learner
from alula.mismatch.measure import Bins, rollouts_with_acceptance
from alula.models.load import LoadedModel, load_model
from alula.models.lora import init_adapter
from alula.objective.correction import Correction
from alula.objective.policy_loss import divisors, policy_loss
from alula.objective.settings import Loss
from alula.settings import DistillSettings, LearnerSettings
from alula.sparsity.policy import DENSE

Row = dict[str, Any]


def select(budget: int) -> Sparsity:
    return Sparsity(select=Select("block-topk", budget, block=16, dense_layers=2))


def evict(budget: int) -> Sparsity:
    return Sparsity(evict=Evict("rkv", budget, buffer=32, window=8, sinks=4))


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.loaded: LoadedModel = load_model(
            options.model, device=options.device, dtype=options.dtype, residual=options.residual
        )
        self.training, held_out = self.data().split(options.held_out, seed=0)
        self.held_out = [list(example.prompt_ids or ()) for example in held_out]
        self.rollouts = RolloutOptions(
            prompts=options.prompts, samples=1, max_new_tokens=options.tokens, temperature=1.0
        )

    def data(self) -> Dataset:
        if self.loaded.tokenizer is not None:
            data = load(self.options.data, split="train", data_dir=self.options.data_dir, answer="")
            return prepare(data, self.loaded.tokenizer, max_prompt_tokens=512)
        ids = torch.randint(2, self.loaded.model.config.vocab_size, (4 * self.options.held_out, 64)).tolist()
        return Dataset(tuple(Example("", prompt_ids=tuple(prompt)) for prompt in ids), "random prompts")

    def engine(self, adapter: Any = None) -> Engine:
        o = self.options
        return Engine(
            self.loaded,
            page=16,
            kv_memory=o.kv_memory,
            max_rows=o.rows,
            max_length=o.tokens + 1024,
            sparse_adapter=adapter,
        )

    def settings(self, **changes: Any) -> DistillSettings:
        o = self.options
        settings = {
            "rank": o.rank,
            "alpha": 2.0 * o.rank,
            "lr": o.lr,
            "minibatches": 4,
            "token_budget": o.token_budget,
        } | changes
        return DistillSettings(**settings)

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
        trained = init_adapter(self.loaded.model, self.options.rank, 2.0 * self.options.rank, ["all"], 0)
        for a, b in trained.weights.values():  # the size of a trained update: about a hundredth of a weight
            b.copy_(0.01 * torch.randn_like(b) / a.shape[0])
        for adapter in (None, trained):
            engine, distiller = self.engine(adapter), Distiller(self.loaded.model, self.settings(), adapter=adapter)
            for policy in (select(96), evict(96), Sparsity(evict=Evict("snapkv", 96, buffer=32))):
                made = generate(engine, prompts, policy, self.rollouts, 1, seed=1)
                with engine.asleep():
                    scores = distiller.score(made)
                gap = torch.cat([s.cpu() - _logprobs(r) for s, r in zip(scores, made)]).abs()
                yield {
                    "kind": "agreement",
                    "dtype": str(self.loaded.model.dtype),
                    "residual": self.options.residual,
                    "adapter": adapter is not None,
                    "sparsity": policy.describe(),
                    "tokens": len(gap),
                    "mean": gap.mean().item(),
                    "p99": gap.quantile(0.99).item(),
                    "most": gap.max().item(),
                }
            del engine, distiller
            release()

    def agreement_float16(self) -> Iterator[Row]:
        return Bench(argparse.Namespace(**vars(self.options) | {"dtype": "float16"})).agreement()

    def agreement_residual(self) -> Iterator[Row]:
        return Bench(argparse.Namespace(**vars(self.options) | {"residual": "float32"})).agreement()

    def select(self) -> Iterator[Row]:
        return self.acceptance(select, self.options.select_budgets)

    def evict(self) -> Iterator[Row]:
        return self.acceptance(evict, self.options.evict_budgets)

    def acceptance(self, make: Callable[[int], Sparsity], budgets: list[int]) -> Iterator[Row]:
        nothing = init_adapter(self.loaded.model, self.options.rank, 2.0 * self.options.rank, ["all"], 0)
        engine = self.engine(nothing)
        self._distil(engine, make(budgets[0]), seed=99, steps=1)  # compiles what the clock should not see
        engine.update_sparse_adapter(nothing)
        without = self._ladder(engine, make)
        for budget in budgets:
            for seed in range(self.options.seeds):
                row = {"kind": "acceptance", "budget": budget} | self._distil(
                    engine, make(budget), seed, self.options.steps
                )
                if seed == 0:
                    row["ladder"] = {"before": without, "after": self._ladder(engine, make)}
                yield row

    def _distil(self, engine: Engine, policy: Sparsity, seed: int, steps: int) -> Row:
        distiller = Distiller(self.loaded.model, self.settings(seed=seed))
        engine.update_sparse_adapter(distiller.adapter())
        before = self._measured(engine, policy, seed)
        losses: list[float] = []
        started = time.perf_counter()
        round_ = replace(self.rollouts, seed=1000 * (seed + 1))
        distill_prompts(
            engine, distiller, policy, self.training, steps, round_, lambda _, row: losses.append(row["distill/kl"])
        )
        spent = time.perf_counter() - started
        after = self._measured(engine, policy, seed)
        return {
            "sparsity": policy.describe(),
            "seed": seed,
            "steps": steps,
            "seconds": spent,
            "kl_by_step": losses,
            "before": before,
            "after": after,
        }

    def _measured(self, engine: Engine, policy: Sparsity, seed: int) -> Row:
        """Exact acceptance on rollouts of its own from the held-out prompts; the tail's interval is over prompts."""
        sampling = Sampling(max_new_tokens=self.options.tokens, seed=-1 - seed)
        made, alphas = rollouts_with_acceptance(engine, self.held_out, sampling, policy)
        [tail] = Bins(1 << 20, 1).tail(made, alphas)
        mean = torch.cat(alphas).mean().item()
        return {"tail": tail.value, "lower": tail.lower, "upper": tail.upper, "mean": mean, "tokens": tail.tokens}

    def _ladder(self, engine: Engine, make: Callable[[int], Sparsity]) -> list[Row]:
        return [{"budget": budget} | self._measured(engine, make(budget), 0) for budget in self.options.ladder]

    def speed(self) -> Iterator[Row]:
        engine, dense = self.engine(), 0.0
        for kind, make in (("dense", lambda _: DENSE), ("select", select), ("evict", evict)):
            for budget in self.options.ladder if kind != "dense" else [0]:
                speed = self._speed(engine, make(budget))
                dense = dense or speed
                yield {
                    "kind": "speed",
                    "policy": kind,
                    "budget": budget,
                    "tokens_per_s": speed,
                    "against_dense": speed / dense,
                }

    def _speed(self, engine: Engine, policy: Sparsity) -> float:
        """Rollout tokens per second at full batch, best of three; φ is merged and has no part in it (see `decode`)."""
        prompts = (self.held_out * self.options.rows)[: self.options.rows]
        sampling = Sampling(max_new_tokens=self.options.speed_tokens, ignore_eos=True, seed=5)
        engine.generate(prompts, sampling, policy)  # compiles, and captures the graphs of every length
        seconds = min(self.seconds(lambda: engine.generate(prompts, sampling, policy)) for _ in range(3))
        return self.options.rows * self.options.speed_tokens / seconds

    def overhead(self) -> Iterator[Row]:
        """On rollouts of the engine, ignoring the end of a text so that lengths are those asked for."""
        for policy in (select(256), evict(256)):
            base = Distiller(self.loaded.model, self.settings())
            engine = self.engine(base.adapter())
            prompts = self.held_out[: self.options.overhead_prompts]
            sampling = Sampling(n=4, max_new_tokens=self.options.overhead_tokens, ignore_eos=True, seed=3)
            made = engine.generate(prompts, sampling, policy, record=policy.evict is not None)
            engine.sleep()
            update = self._update_seconds(made)
            base_row = {
                "kind": "overhead",
                "sparsity": policy.describe(),
                "rollouts": len(made),
                "tokens": sum(len(r.prompt_ids) + len(r) for r in made),
                "update_s": update,
            }
            for fraction in (0.25, 1.0):
                yield base_row | self._step_seconds(made, fraction, update)
            del engine, base
            release()

    def _update_seconds(self, made: list[Rollout]) -> float:
        """One optimizer step of the learner on all rollouts, scoring not included."""
        learner = Learner(self.loaded.model, LearnerSettings(lr=1e-9, token_budget=self.options.overhead_token_budget))
        loss, advantages = Loss(), torch.linspace(-1, 1, len(made), device=self.loaded.model.device)
        lengths = torch.tensor([len(r) for r in made], device=advantages.device)
        sequence = torch.repeat_interleave(torch.arange(len(made), device=advantages.device), lengths)
        whole = divisors(loss, Correction.none(), sequence, len(made))
        old = [_logprobs(r) for r in made]

        def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Any) -> Any:
            index = torch.tensor(batch.index, device=logprobs.device)
            return policy_loss(
                logprobs,
                batch.flat(old),
                batch.rows(advantages)[batch.sequence],
                torch.ones_like(logprobs),
                batch.sequence,
                loss,
                whole.rows(index),
            )

        return min(self.seconds(lambda: learner.update(made, loss_fn)) for _ in range(3))

    def _step_seconds(self, made: list[Rollout], fraction: float, update: float) -> Row:
        settings = self.settings(minibatches=1, token_budget=self.options.overhead_token_budget)
        distiller = Distiller(self.loaded.model, settings)
        some = made[: max(1, round(fraction * len(made)))]
        advantages = torch.linspace(-1, 1, len(some))
        spent = min(self.seconds(lambda: distiller.step(some, advantages)) for _ in range(3))
        return {"fraction": fraction, "distil_s": spent, "of_update": spent / update}

    def decode(self) -> Iterator[Row]:
        """The same captured step on the dense weights and on the merged ones, in turns."""
        adapter = init_adapter(self.loaded.model, self.options.rank, 2.0 * self.options.rank, ["all"], 0)
        engine = self.engine(adapter)
        for policy in (select(256), evict(512)):
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(3):
                for adapted in (False, True):
                    bench = StepBench(engine, min(64, self.options.rows), 1024, policy, adapted)
                    times[adapted].append(bench.seconds())
            without, with_adapter = min(times[False]), min(times[True])
            yield {
                "kind": "decode",
                "sparsity": policy.describe(),
                "without_ms": without * 1e3,
                "with_ms": with_adapter * 1e3,
                "slower": with_adapter / without - 1,
            }
        engine.update_sparse_adapter(adapter)
        yield {"kind": "merge", "seconds": self.seconds(lambda: engine.update_sparse_adapter(adapter))}


def _logprobs(rollout: Rollout) -> torch.Tensor:
    assert rollout.logprobs is not None
    return rollout.logprobs


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


SECTIONS = ("agreement", "agreement_float16", "agreement_residual", "overhead", "decode", "speed", "select", "evict")


def main() -> None:
    parser = arguments(SECTIONS, __doc__)
    parser.add_argument("--model", default=".cache/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--data", default="gsm8k")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--residual", default=None, help="float32, of a 16-bit model")
    parser.add_argument("--kv-memory", default="20GiB")
    parser.add_argument("--rows", type=int, default=256, help="sequences that decode together")
    parser.add_argument("--prompts", type=int, default=256, help="prompts per distillation step")
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=768, help="longest answer")
    parser.add_argument("--steps", type=int, default=20, help="of distillation, per budget and seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--select-budgets", type=numbers, default=[64, 192])
    parser.add_argument("--evict-budgets", type=numbers, default=[64, 192])
    parser.add_argument("--ladder", type=numbers, default=[64, 96, 128, 160, 192, 256])
    parser.add_argument("--speed-tokens", type=int, default=1024)
    parser.add_argument("--overhead-prompts", type=int, default=64)
    parser.add_argument("--overhead-tokens", type=int, default=1024)
    parser.add_argument(
        "--overhead-token-budget", type=int, default=131072, help="tokens per micro-batch in `overhead`"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--token-budget", type=int, default=32768)
    options = parser.parse_args()
    bench = Bench(options)
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "only", "data_dir")}
    settings["model"] = Path(options.model).name
    record({name: getattr(bench, name) for name in SECTIONS}, options, {}, settings=settings)


if __name__ == "__main__":
    main()

"""Distillation on a fixed model, from prompts alone: no rewards, no update of the weights (`alula distill`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from alula.data import Dataset, PromptStream
from alula.distill.distiller import Acceptance, Distiller
from alula.engine.engine import Engine
from alula.engine.rollout import Rollout, Sampling
from alula.sparsity.policy import Sparsity


@dataclass(frozen=True)
class RolloutOptions:
    """Rollouts per step; a measurement takes one rollout per prompt."""

    prompts: int = 64
    samples: int = 1
    max_new_tokens: int = 1024
    temperature: float = 1.0
    seed: int = 0


def distill_prompts(
    engine: Engine,
    distiller: Distiller,
    sparsity: Sparsity,
    training: Dataset,
    steps: int,
    options: RolloutOptions,
    log: Callable[[int, dict[str, float]], None],
    done: int = 0,
) -> None:
    """`steps` times: generate with the sparse policy, train the adapter on the KL, merge it into the engine.

    `done` steps were taken before a resume. `log` is called with the metrics of each completed step.
    """
    stream = PromptStream(training, options.seed)
    stream.next(done * options.prompts)
    for step in range(done + 1, steps + 1):
        started = perf_counter()
        prompts = [list(example.prompt_ids or ()) for example in stream.next(options.prompts)]
        rollouts = generate(engine, prompts, sparsity, options, options.samples, seed=options.seed + step)
        generation_time = perf_counter() - started
        with engine.asleep():
            metrics = distiller.step(rollouts)
        engine.update_sparse_adapter(distiller.adapter())
        distill_time = metrics.pop("time")
        row = {f"distill/{name}": value for name, value in metrics.items()}
        log(step, row | {"time/rollout": generation_time, "time/distill": distill_time})


def measure(
    engine: Engine,
    distiller: Distiller,
    sparsity: Sparsity,
    prompts: Sequence[Sequence[int]],
    options: RolloutOptions,
    seed: int,
) -> Acceptance:
    """Acceptance of the sparse policy with its adapter, on its own rollouts of `prompts`."""
    rollouts = generate(engine, [list(ids) for ids in prompts], sparsity, options, 1, seed)
    with engine.asleep():
        return distiller.measure(rollouts)


def generate(
    engine: Engine, prompts: list[list[int]], sparsity: Sparsity, options: RolloutOptions, samples: int, seed: int
) -> list[Rollout]:
    """Rollouts of the sparse policy, with an evictor's history, which the learner replays."""
    sampling = Sampling(n=samples, max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=seed)
    return engine.generate(prompts, sampling, sparsity, record=sparsity.evict is not None)

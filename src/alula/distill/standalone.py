"""φ alone on a fixed model, from prompts: no rewards, no update of θ. What `alula distill` does before any RL."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from alula.data import Dataset, PromptStream
from alula.distill.distiller import Distiller
from alula.distill.measure import Acceptance
from alula.engine.engine import Engine
from alula.engine.rollout import Rollout, Sampling
from alula.sparsity.policy import Sparsity


@dataclass(frozen=True)
class Rollouts:
    """What is generated: per step, and with one rollout a prompt for every measurement."""

    prompts: int = 64
    samples: int = 1
    max_new_tokens: int = 1024
    temperature: float = 1.0
    seed: int = 0


def distill_alone(
    engine: Engine,
    distiller: Distiller,
    sparsity: Sparsity,
    training: Dataset,
    steps: int,
    rollouts: Rollouts,
    log: Callable[[int, dict[str, float]], None],
    done: int = 0,
) -> None:
    """`steps` times: generate with the sparse policy, train φ on it, merge φ into the engine.

    `done` steps of them were taken before, by a run that this one continues. `log` is told of each step once all of
    it is done.
    """
    stream = PromptStream(training, rollouts.seed)
    stream.next(done * rollouts.prompts)
    for step in range(done + 1, steps + 1):
        started = perf_counter()
        prompts = [list(example.prompt_ids or ()) for example in stream.next(rollouts.prompts)]
        made = generate(engine, prompts, sparsity, rollouts, rollouts.samples, seed=rollouts.seed + step)
        generated = perf_counter() - started
        with engine.asleep():
            metrics = distiller.step(made)
        engine.update_sparse_adapter(distiller.adapter())
        distilled = metrics.pop("time")
        row = {f"distill/{name}": value for name, value in metrics.items()}
        log(step, row | {"time/rollout": generated, "time/distill": distilled})


def measure(
    engine: Engine,
    distiller: Distiller,
    sparsity: Sparsity,
    prompts: Sequence[Sequence[int]],
    rollouts: Rollouts,
    seed: int,
) -> Acceptance:
    """Acceptance of the sparse policy, φ included, on rollouts of its own."""
    made = generate(engine, [list(ids) for ids in prompts], sparsity, rollouts, 1, seed)
    with engine.asleep():
        return distiller.measure(made)


def generate(
    engine: Engine, prompts: list[list[int]], sparsity: Sparsity, rollouts: Rollouts, samples: int, seed: int
) -> list[Rollout]:
    """With an evictor's history, which the learner replays."""
    sampling = Sampling(n=samples, max_new_tokens=rollouts.max_new_tokens, temperature=rollouts.temperature, seed=seed)
    return engine.generate(prompts, sampling, sparsity, record=sparsity.evict is not None)

"""DistillSparse in a run: its adapter is trained before the first step, and a sparser policy is tried."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from alula.data import PromptStream
from alula.files import count_text
from alula.run.run_log import RunLogger
from alula.trainer.collector import Collector

if TYPE_CHECKING:  # only a run that distils loads it
    from alula.distill.run_stage import RunDistiller


def distill_first(
    distill: "RunDistiller", collector: Collector, logger: RunLogger, finished_batch: Callable[[], None]
) -> None:
    """Train only the adapter, on prompts from a separate stream, so that the run's own order stays the same."""
    first, world = distill.settings.first, collector.world
    assert first is not None
    done = len(distill.divergences)
    left = count_text((first.steps - done) * first.prompts, "rollout")
    logger.message(f"distilling before the first step, on {left}.")
    stream = PromptStream(collector.stream.dataset, ~collector.config.seed)
    stream.next(done * first.prompts)
    while distill.first_due():
        collector.stop.raise_if_stop_requested()
        logger.phase(f"distilling before the first step, {len(distill.divergences) + 1} of {first.steps}")
        indices = world.local_slice(range(stream.seen, stream.seen + first.prompts))
        examples = world.local_slice(stream.next(first.prompts))
        sampling, sparsity = collector.sampling("first"), collector.sparsity
        record = [sparsity.evict is not None] * len(examples)
        distill.first_step(collector.rollouts(examples, sampling, sparsity, indices, record=record))
        finished_batch()
    trained, skipped = count_text(first.steps * first.prompts, "rollout"), distill.distiller.skipped
    logger.event(
        0,
        "distilled-first",
        f"The adapter was trained on {trained} before the first step: divergence of the first "
        f"batch {distill.divergences[0]:.4f}, of the last {distill.divergences[-1]:.4f}"
        + (f"; {count_text(skipped, 'update')} skipped as not finite." if skipped else "."),
        "See mismatch/veto_rate of the first step for the remaining mismatch.",
    )


def try_move(distill: "RunDistiller", collector: Collector, step: int, logger: RunLogger) -> None:
    """Measure the sparser policy of `distill.move`, and adopt it if its tail allows."""
    logger.phase("measuring a sparser policy")
    candidate, sampling = distill.candidate, collector.sampling("move", step)
    assert candidate is not None
    record = [candidate.evict is not None] * len(distill.prompts)
    rollouts = collector.rollouts(distill.prompts, sampling, candidate, distill.prompt_indices, record=record)
    message = distill.try_move(step, rollouts)
    if distill.moved:
        collector.adopt(candidate)
    logger.event(step, "sparser", message, "See distill/candidate_tail in the metrics.")

"""Ends a run whose environment or reward fails on every one of its first answers."""

from collections import Counter
from collections.abc import Mapping

from alula.distributed import World
from alula.errors import RunFailed
from alula.trainer.batch import RolloutBatch
from alula.trainer.step_metrics import sum_over_ranks


def raise_if_environment_failed(batch: RolloutBatch, world: World) -> None:
    """Raise if the environment failed in every one of the run's first episodes. Every rank must call this."""
    reasons = [reason for share in world.all_gather(batch.environment_failures()) for reason in share]
    count = sum_over_ranks(world, len(batch.rollouts))
    if reasons and len(reasons) >= count:
        raise RunFailed(
            f"the environment failed in every one of the run's first {count:.0f} episodes, most often with "
            f"{Counter(reasons).most_common(1)[0][0]!r}. Correct it, or raise environment.timeout if it is only "
            "slow; `alula train --check` tries it on the data."
        )


def raise_if_ungraded(names: list[str], failures: Mapping[str, int], count: int, which: str, world: World) -> None:
    """Raise if one of these rewards failed on every answer: it would count 0 to the end of the run.

    `failures` counts the reasons of this rank's `count` answers. Every rank must call this.
    """
    shares = world.all_gather((dict(failures), count))
    answers = sum(count for _, count in shares)
    for name in names:
        prefix = f"{name}: "
        reasons: Counter[str] = Counter()
        for share, _ in shares:
            reasons.update({why: times for why, times in share.items() if why.startswith(prefix)})
        if reasons.total() >= answers:
            raise RunFailed(
                f"the reward {name} failed on every one of the {which} {answers} answers, most often with "
                f"{reasons.most_common(1)[0][0].removeprefix(prefix)!r}. Correct it, or raise rewards.timeout if "
                "it is only slow; `alula train --check` tries it on the data."
            )

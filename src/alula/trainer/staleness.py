"""How old the rollouts are that a step learns from, where they are generated ahead of the learner."""

from collections.abc import Sequence

import torch

from alula.distributed import World
from alula.engine.rollout import Rollout
from alula.mismatch.control.monitor import is_current


def staleness_metrics(
    rollouts: Sequence[Rollout], vetoed: Sequence[bool], version: int, world: World
) -> dict[str, float]:
    """Ages in steps, over all sampled tokens of all ranks; the vetoes of rollouts that the present version sampled
    from their first token to the last, if there are any. `version` is the learner's."""
    ages = version - torch.cat([torch.empty(0, dtype=torch.int64), *(rollout.versions for rollout in rollouts)])
    current = [veto for rollout, veto in zip(rollouts, vetoed) if is_current(rollout, version)]
    mine = (int(ages.sum()), len(ages), int((ages == 0).sum()), int(ages.max()) if len(ages) else 0)
    ranks = world.all_gather((*mine, sum(current), len(current)))
    total, tokens, fresh, _, vetoes, counted = (sum(column) for column in zip(*ranks))
    metrics = {
        "workers/age_mean": total / max(tokens, 1),
        "workers/age_max": float(max(rank[3] for rank in ranks)),
        "mismatch/current_tokens": fresh / max(tokens, 1),
    }
    return metrics | ({"mismatch/current_veto_rate": vetoes / counted} if counted else {})

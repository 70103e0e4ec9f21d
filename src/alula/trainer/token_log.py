"""All rollouts of one prompt, token by token, for rollouts.jsonl: text, ratio and evictions."""

from typing import Any

import torch
from torch import Tensor

from alula.engine.rollout import NEVER, Rollout
from alula.objective.veto import REFERENCE_VETO
from alula.trainer.batch import RolloutBatch
from alula.trainer.update import StepResult


def group_tokens(batch: RolloutBatch, result: StepResult, tokenizer: Any, veto: float | None) -> dict[str, Any]:
    """The first group of the batch. `log_ratio` is log ξ of each token, None for given ones. `evicted` has a digit per
    token of prompt and answer: the share of heads, over all layers, that had evicted it by the end, from 0 (none) to 9
    (all)."""
    first = batch.rollouts[0]
    return {
        "sparsity": first.sparsity.describe(),
        "veto": REFERENCE_VETO if veto is None else veto,
        "prompt": texts(tokenizer, first.prompt_ids),
        "rollouts": [
            {
                "tokens": texts(tokenizer, batch.rollouts[i].token_ids),
                "log_ratio": rounded(log_ratio(batch.rollouts[i], batch.dense[i].cpu())),
                "evicted": None if batch.rerolled and batch.rerolled[i] else evicted_digits(batch.rollouts[i]),
                "reward": batch.rewards[i],
                "advantage": round(float(result.advantages[i]), 4),
                "finish": batch.rollouts[i].finish,
                "vetoed": result.vetoed[i],
                "rejected": result.rejected[i],
                "rerolled": bool(batch.rerolled and batch.rerolled[i]),
            }
            for i in range(batch.n)
        ],
    }


def log_ratio(rollout: Rollout, dense: Tensor) -> Tensor:
    """log ξ [tokens], NaN for given tokens; `dense` has the sampled ones."""
    ratio = torch.full((len(rollout),), torch.nan)
    ratio[rollout.sampled] = dense - rollout.sampler_logprobs()[rollout.sampled].cpu()
    return ratio


def texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token alone, with the space that a tokenizer of words puts behind it."""
    alone = tokenizer.batch_decode([[token] for token in ids])
    words = len(ids) > 1 and tokenizer.decode(ids) == " ".join(alone)
    return [text + " " for text in alone] if words else alone


def rounded(values: Tensor) -> list[float | None]:
    """Three decimals; None where a value is not finite, which JSON cannot hold."""
    return [round(value, 3) if finite else None for value, finite in zip(values.tolist(), values.isfinite().tolist())]


def evicted_digits(rollout: Rollout) -> str | None:
    """None if nothing was recorded."""
    if rollout.history is None:
        return None
    length = len(rollout.prompt_ids) + len(rollout)
    share = (rollout.history[..., :length] != NEVER).float().mean((0, 1))
    return "".join(str(digit) for digit in torch.round(share * 9).int().tolist())

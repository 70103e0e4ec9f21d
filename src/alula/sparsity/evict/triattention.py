"""TriAttention: keeps the keys that the model's average query will attend to at coming positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from alula.errors import require
from alula.ops.frequency_score import frequency_score
from alula.sparsity.evict.base import Cached, Evictor


@dataclass(frozen=True)
class TriAttention(Evictor):
    """score_j = mean over layers of max over the group of z_j(T_j + E_j), the same in every layer

    T_j = mean over δ of Σ_f |q̄_f||k_f| cos(ω_f (t + δ − p_j) + arg q̄_f − arg k_f): the logit of the mean query q̄ at the
    positions t + δ, where δ = 1, 2, 4, ... ≤ `horizon` and t is the next position. E_j = Σ_f (mean |q_f| − |q̄_f|) |k_f|
    stands for the part of queries that differs from their mean. q and k are taken before their rotation, as one complex
    number per RoPE frequency f. z_j subtracts the mean over the tokens of a query head and divides by their standard
    deviation; a protected prompt is left out of both. The means over queries are statistics of the model
    (`QueryStatistics`).
    Source: TriAttention (arXiv 2604.04921), as its released code computes it with `per_head_pruning`.

    horizon: how far ahead the mean query is placed, in tokens.
    """

    horizon: int = 65536

    calibrated = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.horizon >= 1, f"horizon={self.horizon}: must be at least one token.")

    def score(self, kv: Cached) -> Tensor:
        heads, n = kv.shape[1:]
        logits = frequency_score(kv.paged, *self.query(kv))  # [R, Hq, n]
        ranked = logits[..., kv.protected :]
        mean = ranked.mean(-1, keepdim=True)
        deviation = (ranked - mean).square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)
        best = ((logits - mean) / deviation).unflatten(1, (heads, -1)).amax(2)  # [R, Hkv, n]
        shared = best.view(-1, kv.layers, heads, n).mean(1)
        return shared.repeat_interleave(kv.layers, 0)

    def query(self, kv: Cached) -> tuple[Tensor, Tensor]:
        """fp32 [R, Hq, D] and [R, Hq, F]: the rotated mean query, and the weights of |k_f|.

        T_j is linear in the rotation of the query, so that the mean over δ is one query, and its logit with the rotated
        key needs no position of the key.
        """
        known = kv.statistics
        assert known is not None
        assert kv.position is not None
        position = kv.position[:: kv.layers]
        ahead = 2.0 ** torch.arange(self.horizon.bit_length(), dtype=torch.float64, device=position.device)
        phase = (position[:, None] + ahead)[..., None] * known.frequencies  # [C, offsets, F]
        turn = torch.polar(torch.full_like(phase, known.rope_scaling), phase).mean(1)
        turned = (known.mean * turn[:, None, None]).flatten(0, 1)  # [C·L, Hq, F]
        spread = (known.size - known.mean.abs()) * known.rope_scaling
        query = torch.cat([turned.real, turned.imag], -1).float()
        return query, spread.repeat(len(position), 1, 1).float()

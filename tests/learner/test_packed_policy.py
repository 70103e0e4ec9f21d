"""The learner runs packed attention in every layer. (A fallback would give the same numbers, slowly.)"""

import torch

import alula.learner.forward as attention
from alula.engine.rollout import Rollout
from alula.learner.forward import Policy
from alula.learner.packing import collate
from alula.models.load import share_weights


def test_every_layer_attends_packed_and_no_mask_is_built(tiny, monkeypatch):
    other = share_weights(tiny.model)
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments[3].tolist())
        return real(*arguments, **options)

    real = attention.packed_attention
    monkeypatch.setattr(attention, "packed_attention", counted)
    policy = Policy(tiny.model, chunk=64)
    rollouts = [Rollout([1, 2, 3], [4, 5], None, "length"), Rollout([7], [8, 9, 10], None, "length")]
    with torch.no_grad():
        policy(collate(rollouts, [0, 1]), 1.0)
    assert calls == [[0, 5, 9]] * tiny.model.config.num_hidden_layers
    assert other.config._attn_implementation != attention.NAME

"""Activation checkpointing and token budget by what fits: the count of activations, the choice, and its record."""

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import toy
from alula.distributed import World
from alula.learner.activations import activation_bytes
from alula.learner.forward import Policy, hidden_states
from alula.learner.packing import collate
from alula.learner.sft import Trace
from alula.models.geometry import Geometry
from alula.settings import LearnerSettings
from alula.trainer import learner_fit
from alula.trainer.learner_fit import BUDGETS, choose, fit_learner
from alula.trainer.memory_plan import USABLE, plan_memory

GPU = World(device=torch.device("cuda"))


class Alive(TorchDispatchMode):
    """Storages that operators made and something still refers to."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counted_activations_are_those_that_a_real_forward_keeps(tiny, dtype):
    """Against the bytes that are alive after a forward pass on the CPU, from which the weights are left out."""
    tokens, model = 256, tiny.model.to(getattr(torch, dtype))
    policy = Policy(model, 64)
    batch = collate([Trace([5], [7] * (tokens - 1))], [0], torch.device("cpu"))
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    with Alive() as alive:
        hidden = hidden_states(policy.model, batch)
    gc.collect()
    kept = sum(n for at, (storage, n) in alive.storages.items() if storage() is not None and at not in own)
    assert hidden.requires_grad
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(model.config).to(model.dtype)
    geometry = Geometry.of(model)
    # attention per sequence, as on the CPU, joins its outputs in one more tensor; and the result itself is alive
    more = geometry.layers * geometry.attention_width + model.config.hidden_size
    assert (activation_bytes(bare) + more * hidden.element_size()) * tokens == pytest.approx(kept, rel=1e-3)


def plan_of(tmp_path, *overrides):
    return plan_memory(toy.toy(tmp_path, *overrides))


def test_the_first_that_fits_is_chosen(tmp_path):
    plan = replace(plan_of(tmp_path), layer_inputs=100, all_activations=2000, longest=5000)
    fixed = plan.learning - plan.activations

    def chosen(room: int, **given):
        result = choose(LearnerSettings(**given), plan, int((fixed + room) / USABLE) + 2)
        return result["activation_checkpointing"], result["token_budget"]

    assert chosen(10**15) == (False, 65536)
    assert chosen(2000 * 16384) == (False, 16384)
    assert chosen(2000 * 16384 - 100) == (False, 8192)
    assert chosen(2000 * 5000) == (False, 4096), "the longest sequence is a micro-batch by itself"
    assert [plan.activations_of(True, budget) for budget in (4096, 8192)] == [100 * 5000, 100 * 8192]
    assert chosen(2000 * 5000 - 100) == (True, 16384)
    assert chosen(100 * 8192) == (True, 8192)
    assert chosen(0) == (True, BUDGETS[-1])
    assert chosen(0, activation_checkpointing=False, token_budget=9) == (False, 9), "what is given wins"
    assert chosen(2000 * 16384, activation_checkpointing=True) == (True, 16384)
    assert chosen(2000 * 6000, token_budget=6000) == (False, 6000)
    unknown = replace(plan, all_activations=None)
    assert choose(LearnerSettings(), unknown, 10**15)["activation_checkpointing"], "a mixture keeps it"


def test_the_choice_is_recorded_and_kept_by_a_resume(tmp_path, monkeypatch):
    config = toy.toy(tmp_path, "learner={lr: 0.1}")
    memory = [10**12]
    monkeypatch.setattr(learner_fit, "available", lambda device: memory[0])
    fitted = fit_learner(config, GPU, False, None)
    assert (fitted.learner.activation_checkpointing, fitted.learner.token_budget) == (False, 65536)
    assert fitted.learner.lr == 0.1
    path = tmp_path / learner_fit.FILE
    assert json.loads(path.read_text()) == {"activation_checkpointing": False, "token_budget": 65536}
    memory[0] = 0
    assert fit_learner(config, GPU, True, None) == fitted
    given = toy.toy(tmp_path, "learner={lr: 0.1, token_budget: 77}")
    assert fit_learner(given, GPU, True, None).learner.token_budget == 77
    assert fit_learner(config, GPU, False, None).learner.activation_checkpointing is True
    path.write_text("{")
    assert fit_learner(config, GPU, True, None).learner.token_budget == BUDGETS[-1], "an unreadable file is replaced"


def test_the_cpu_keeps_the_defaults(tmp_path):
    config = toy.toy(tmp_path, "learner={}")
    assert fit_learner(config, World(), False, None) is config
    assert (config.learner.checkpoints_activations, config.learner.tokens) == (True, 16384)
    assert not (tmp_path / learner_fit.FILE).exists()

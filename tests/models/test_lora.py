"""The LoRA of the learner against peft: the same initial numbers, the same output, the same merged weights."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from alula.errors import SettingError
from alula.models.load import load_model
from alula.models.lora import Adapter, LoRALinear, attach_trainable, disabled, linears, merged_parameters

peft = pytest.importorskip("peft")
RANK, ALPHA, SEED = 4, 8.0, 3


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def models(request):
    model = load_model("shape:tiny-qwen2", dtype=request.param).model
    theirs = copy.deepcopy(model)
    names = [name for name, _ in linears(theirs)]
    torch.manual_seed(SEED)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names)
    peft.inject_adapter_in_model(config, theirs)
    ours = copy.deepcopy(model)
    attach_trainable(ours, RANK, ALPHA, SEED)
    return model, ours, theirs, names


def with_trained_b(ours, theirs, names) -> None:
    """Both adapters get the same B, as after some training."""
    generator = torch.Generator().manual_seed(0)
    for name in names:
        layer, reference = ours.get_submodule(name), theirs.get_submodule(name)
        value = torch.randn(layer.lora_b.shape, generator=generator).to(layer.lora_b)
        layer.lora_b.data.copy_(value)
        reference.lora_B["default"].weight.data.copy_(value)


def test_the_initial_numbers_are_those_of_peft(models):
    _, ours, theirs, names = models
    for name in names:
        layer, reference = ours.get_submodule(name), theirs.get_submodule(name)
        assert torch.equal(layer.lora_a, reference.lora_A["default"].weight.to(layer.lora_a))
        assert not reference.lora_B["default"].weight.any()
    trainable = [name for name, parameter in ours.named_parameters() if parameter.requires_grad]
    assert len(trainable) == 2 * len(names)


def test_output_and_merged_weights_are_those_of_peft(models):
    model, ours, theirs, names = models
    ids = torch.arange(12)[None]
    with_trained_b(ours, theirs, names)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert not torch.equal(ours(ids).logits, model(ids).logits)
        with disabled(ours):
            assert torch.equal(ours(ids).logits, model(ids).logits)
        assert all(m.enabled for m in ours.modules() if isinstance(m, LoRALinear))
        merged = dict(merged_parameters(ours))
        assert merged.keys() == dict(model.named_parameters()).keys()
        for name in names:
            reference = theirs.get_submodule(name)
            a, b = (each["default"].weight.float() for each in (reference.lora_A, reference.lora_B))
            weight = reference.base_layer.weight
            assert torch.equal(merged[f"{name}.weight"], (weight.float() + ALPHA / RANK * (b @ a)).to(weight.dtype))


A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        ([A], {"r": 2, "lora_alpha": 4}, r"no tensor base_model.*lora_B\.weight"),
        ([A[17:], B[17:]], {"r": 2, "lora_alpha": 4}, r"no tensor base_model.*lora_A\.weight"),
        ([A, B], [1], r"adapter_config\.json must hold a JSON object"),
        ([A, B], {"r": None, "lora_alpha": 4}, "not a LoRA adapter"),
    ],
)
def test_files_that_are_not_an_adapter_are_named(tmp_path, names, settings, message):
    save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(SettingError, match=message):
        Adapter.load(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"alora_invocation_tokens": [5]},
        {"layer_replication": [[0, 1], [0, 2]]},
    ],
)
def test_variants_with_plain_tensors_raise(tmp_path, settings):
    """What peft computes with these files is not W + scale · B A."""
    model = load_model("shape:tiny-qwen2", dtype="float32").model
    trained = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], **settings))
    trained.save_pretrained(tmp_path)
    with pytest.raises(SettingError, match=rf"{next(iter(settings))}.* is not plain LoRA"):
        Adapter.load(tmp_path)


@pytest.mark.parametrize("initial", [True, "gaussian", "orthogonal"])
def test_other_initial_values_are_read(tmp_path, initial):
    model = load_model("shape:tiny-qwen2", dtype="float32").model
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=initial)
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    assert len(Adapter.load(tmp_path).weights) == model.config.num_hidden_layers

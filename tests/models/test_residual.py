"""A 16-bit decoder with a float32 residual stream: dtypes, accuracy, copies and training."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.config.load import load_config
from alula.data.load_tokenizer import attach_tokenizer
from alula.data.tasks import build
from alula.data.tasks.tokenizer import task_tokenizer
from alula.distill.distiller import Distiller
from alula.engine import model_runner
from alula.errors import SettingError
from alula.learner.learner import Learner
from alula.models.load import load_model, share_weights
from alula.models.lora import init_adapter
from alula.models.residual import widen_residual
from alula.models.shapes import SHAPES
from alula.settings import DistillSettings, LearnerSettings, LoRASettings

IDS = torch.tensor([[5, 6, 7, 90, 3, 11, 12, 40, 41, 2]])
PROMPTS = [[5, 6, 7, 8] * 3, [9, 10, 11, 44, 90], [100, 3]]
SAMPLING = Sampling(max_new_tokens=48, n=2, seed=1, ignore_eos=True)
EVICT = Sparsity(Evict("rkv", 24, buffer=8, window=4, sinks=2))
SELECT = Sparsity(select=Select("block-topk", 24, block=8, dense_layers=1))
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
DEEP = "shape:deep-llama"
RECIPE = Path(__file__).parents[2] / "recipes" / "toy.yaml"


@pytest.fixture(autouse=True)
def deep(monkeypatch):
    """Deep enough that rounding at every layer adds up."""
    monkeypatch.setitem(SHAPES, "deep-llama", {**SHAPES["tiny-llama"], "num_hidden_layers": 16})


def wide(shape, **settings):
    return load_model(shape, **{"dtype": "bfloat16", "residual": "float32"} | settings)


def seen(model, run):
    """The dtypes of the layers' outputs and of the matrix products' inputs."""
    given, read = [], []
    layers = model.get_decoder().layers
    hooks = [layer.register_forward_hook(lambda _, i, out: given.append(out.dtype)) for layer in layers]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_pre_hook(lambda _, i: read.append(i[0].dtype)))
    run(model)
    for hook in hooks:
        hook.remove()
    assert len(given) >= len(layers)
    return set(given), set(read)


def plain(model):
    with torch.no_grad():
        model(IDS)


# What it computes


@pytest.mark.parametrize("name", TINY)
def test_float32_models_are_unchanged(name):
    with torch.no_grad():
        outs = [load_model(f"shape:{name}", residual=r).model(IDS).logits for r in (None, "float32")]
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", TINY)
def test_the_stream_is_float32_and_products_read_16_bits(name, dtype):
    model = wide(f"shape:{name}", dtype=dtype).model
    narrow = getattr(torch, dtype)
    twin = share_weights(model)
    for one in (model, twin, share_weights(twin), copy.deepcopy(twin)):
        assert seen(one, plain) == ({torch.float32}, {narrow})
    assert seen(load_model(f"shape:{name}", dtype=dtype).model, plain) == ({narrow}, {narrow})


def by_hand(model, ids):
    """The hidden states of a Llama in bfloat16 over a float32 stream, written out."""
    config, weights = model.config, dict(model.named_parameters())
    heads, width = config.num_attention_heads, config.head_dim

    def norm(x, name):
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        return (weights[name].float() * scaled).bfloat16()

    def split(x):
        return x.view(len(ids), heads, width).transpose(0, 1)

    def rotate(x):
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    angles = torch.arange(len(ids))[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    cos, sin = (torch.cat([f(angles)] * 2, -1).bfloat16() for f in (torch.cos, torch.sin))
    stream = weights["model.embed_tokens.weight"][ids].float()
    for i in range(config.num_hidden_layers):
        w = {n.removeprefix(f"model.layers.{i}."): p for n, p in weights.items() if f"layers.{i}." in n}
        x = norm(stream, f"model.layers.{i}.input_layernorm.weight")
        q, k, v = (split(x @ w[f"self_attn.{n}_proj.weight"].T) for n in "qkv")
        attended = F.scaled_dot_product_attention(rotate(q)[None], rotate(k)[None], v[None], is_causal=True)[0]
        stream = stream + attended.transpose(0, 1).reshape(len(ids), -1) @ w["self_attn.o_proj.weight"].T
        x = norm(stream, f"model.layers.{i}.post_attention_layernorm.weight")
        gate, up = (x @ w[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        stream = stream + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(stream, "model.norm.weight")


@torch.no_grad()
def test_hidden_states_follow_the_formula_and_are_closer_to_float32():
    model, before = wide(DEEP).model, load_model(DEEP, dtype="bfloat16").model
    exact = copy.deepcopy(before).float()
    hand = by_hand(model, IDS[0]).float()
    found, narrow, truth = (m.model(IDS).last_hidden_state[0].float() for m in (model, before, exact))
    assert (found - hand).abs().mean() < 0.05 * (narrow - hand).abs().mean()
    assert (found - truth).abs().mean() < 0.8 * (narrow - truth).abs().mean()


@torch.no_grad()
def test_a_copy_is_independent():
    model = wide("shape:tiny-llama").model
    other, before = copy.deepcopy(model), model(IDS).logits
    for parameter in other.model.norm.parameters():
        parameter.mul_(2.0)
    torch.testing.assert_close(other(IDS).logits, 2 * before, rtol=0.02, atol=0.02)
    assert torch.equal(model(IDS).logits, before)


def test_resized_vocabulary_keeps_the_float32_stream():
    loaded = attach_tokenizer(wide("shape:tiny-qwen3"), task_tokenizer(build("successor")), resize=True)
    assert loaded.model.config.vocab_size < 128
    ids = IDS % loaded.model.config.vocab_size
    assert seen(loaded.model, lambda model: model(ids)) == ({torch.float32}, {torch.bfloat16})


@pytest.mark.parametrize(
    "config",
    [OlmoConfig, GraniteConfig, GemmaConfig, Phi3Config, lambda **s: Qwen3MoeConfig(**s, num_experts_per_tok=2)],
    ids=["olmo", "granite", "gemma", "phi3", "qwen3-moe"],
)
def test_other_plain_decoders_have_a_float32_stream(config):
    model = AutoModelForCausalLM.from_config(config(**SMALL), dtype=torch.bfloat16).eval()
    widen_residual(model)
    run = lambda model: model(IDS % 64)  # noqa: E731
    assert seen(model, run) == ({torch.float32}, {torch.bfloat16})
    assert seen(share_weights(model), run) == ({torch.float32}, {torch.bfloat16})


class Rounds(nn.Module):
    """A layer whose output has the dtype of its weights."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden, **others):
        return self.layer(hidden, **others).bfloat16()


def test_unsupported_architectures_raise():
    for config, reason in (
        (Olmo2Config(**SMALL), "Olmo2ForCausalLM .*norm"),
        (Starcoder2Config(**SMALL), r"Starcoder2ForCausalLM .*dtype"),
    ):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        with pytest.raises(SettingError, match=f"^residual=float32: {reason}.*dtype=float32") as error:
            widen_residual(model)
        assert "\n" not in str(error.value)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.bfloat16).eval()
    model.model.layers[1] = Rounds(model.model.layers[1])
    with pytest.raises(SettingError, match=r"residual=float32: LlamaForCausalLM .*layers"):
        widen_residual(model)
    with pytest.raises(SettingError, match="residual=float64"):
        load_model("shape:tiny-llama", residual="float64")


# The engine


def gap(loaded, policy):
    """Mean distance of the engine's log-probs and those of a packed pass of the same policy."""
    engine = Engine(loaded, page=8, kv_memory="32MiB", max_rows=8)
    rollouts = engine.generate(PROMPTS, SAMPLING, policy, record=policy.evict is not None)
    assert all(len(r) == 48 for r in rollouts)
    if policy.dense:
        scores = [s.logprobs for s in engine.score(rollouts)]
    else:
        scores = Distiller(loaded.model, DistillSettings(rank=2, alpha=4.0)).score(rollouts)
    return torch.cat([s - r.logprobs for s, r in zip(scores, rollouts)]).abs().mean().item()


@pytest.mark.parametrize("policy", [Sparsity(), EVICT, SELECT], ids=["dense", "evict", "select"])
@pytest.mark.slow
def test_engine_and_learner_logprobs_are_closer(policy):
    assert gap(wide(DEEP), policy) < 0.85 * gap(load_model(DEEP, dtype="bfloat16"), policy)


@pytest.mark.slow
def test_engine_and_its_sparse_model_have_a_float32_stream():
    engine = Engine.load("shape:tiny-qwen2", dtype="bfloat16", residual="float32", page=8, kv_memory="16MiB")
    assert seen(engine.model, lambda _: engine.generate(PROMPTS, SAMPLING)) == ({torch.float32}, {torch.bfloat16})
    loaded = wide("shape:tiny-qwen2")
    adapter = init_adapter(loaded.model, 2, 4.0, ["all"], 0)
    adapted = Engine(loaded, page=8, kv_memory="16MiB", sparse_adapter=adapter)
    for policy in (EVICT, SELECT):
        run = lambda _: adapted.generate(PROMPTS, SAMPLING, policy, record=policy.evict is not None)  # noqa: B023, E731
        assert seen(adapted.sparse_model, run) == ({torch.float32}, {torch.bfloat16})
    rollouts = adapted.generate(PROMPTS, SAMPLING, EVICT, record=True)
    distiller = Distiller(loaded.model, DistillSettings(rank=2, alpha=4.0))
    for model in (distiller.policy.model, distiller.policy.teacher):
        assert seen(model, lambda _: distiller.step(rollouts)) == ({torch.float32}, {torch.bfloat16})


@pytest.mark.slow
def test_all_layers_compile_to_one_graph(monkeypatch):
    """As those of models that the engine has no kernels of its own for."""
    real = torch.compile
    monkeypatch.setattr(model_runner, "fusible", lambda model: False)
    monkeypatch.setattr(torch, "compile", lambda f, options, **given: real(f, backend="eager", **given))
    torch._dynamo.reset()
    counters.clear()
    for graphs, residual in enumerate((None, "float32", None), start=1):
        loaded = load_model("shape:tiny-llama", dtype="bfloat16", residual=residual)
        engines = [Engine(loaded, page=8, kv_memory="16MiB", max_rows=4, compiled=c) for c in (True, False)]
        compiled, other = (engine.generate(PROMPTS, SAMPLING) for engine in engines)
        assert counters["stats"]["unique_graphs"] == min(graphs, 2), "one for narrow models, one for wide ones"
        assert [r.token_ids for r in compiled] == [r.token_ids for r in other]
        assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(compiled, other))


# The learner

SEQUENCES = [
    SimpleNamespace(prompt_ids=[3, 4, 5], token_ids=[9, 8, 7, 60]),
    SimpleNamespace(prompt_ids=[1], token_ids=[2, 100]),
]


def update(loaded, keep_reference=False, **settings):
    learner = Learner(loaded.model, LearnerSettings(lr=1e-2, **settings), keep_reference=keep_reference)
    run = lambda _: found.append(learner.update(SEQUENCES, lambda p, e, b: (-p.mean(), {})))  # noqa: E731
    found = []
    assert seen(learner.model, run) == ({torch.float32}, {torch.bfloat16})
    assert found[0].taken
    return learner, found[0]


@pytest.mark.parametrize("lora", [None, LoRASettings(rank=2, alpha=4)], ids=["full", "lora"])
def test_the_learner_updates_with_and_without_activation_checkpointing(lora):
    steps = [update(wide("shape:tiny-qwen3"), lora=lora, activation_checkpointing=c) for c in (False, True)]
    for a, b in zip(steps[0][1].logprobs, steps[1][1].logprobs):
        assert torch.equal(a, b)
    for (name, a), (_, b) in zip(steps[0][0].full_parameters(), steps[1][0].full_parameters()):
        assert torch.equal(a, b), name
    before = dict(wide("shape:tiny-qwen3").model.named_parameters())
    assert any(not torch.equal(before[name], p) for name, p in steps[0][0].full_parameters())


def test_gradients_are_closer_to_float32():
    exact, found, narrow = (
        load_model(DEEP, dtype=d, residual=r).model
        for d, r in (("bfloat16", None), ("bfloat16", "float32"), ("bfloat16", None))
    )
    exact = exact.float()
    for model in (exact, found, narrow):
        model(IDS).logits.float().log_softmax(-1)[0, :-1].gather(-1, IDS[0, 1:, None]).mean().backward()
    wrong = [0.0, 0.0]
    for parameters in zip(*(m.parameters() for m in (exact, found, narrow))):
        truth, *others = (p.grad.float() for p in parameters)
        wrong = [sum_ + float((g - truth).norm() / truth.norm()) for sum_, g in zip(wrong, others)]
    assert wrong[0] < 0.85 * wrong[1]


def test_reference_policy_has_a_float32_stream():
    loaded = wide("shape:tiny-qwen3")
    start = Learner(copy.deepcopy(loaded.model)).score(SEQUENCES)
    learner, _ = update(loaded, keep_reference=True)
    assert seen(learner.reference.model, lambda _: learner.score(SEQUENCES, reference=True))[0] == {torch.float32}
    for a, b, c in zip(start, learner.score(SEQUENCES, reference=True), learner.score(SEQUENCES)):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_recipe_sets_the_residual_dtype(tmp_path):
    from alula.trainer.memory_plan import plan_memory
    from alula.trainer.trainer import Trainer

    overrides = ["model.dtype=bfloat16", "steps=1", "model.device=cpu", f"out={tmp_path}"]
    overrides += ["learner.activation_checkpointing=true"]  # only the stream is kept then
    configs = [load_config(RECIPE, [*overrides, *more]) for more in ([], ["model.residual=float32"])]
    assert plan_memory(configs[1]).activations == 2 * plan_memory(configs[0]).activations
    trainer = Trainer(configs[1])
    learns = lambda _: seen_by.append(seen(trainer.learner.model, lambda _: trainer.run()))  # noqa: E731
    seen_by = []
    seen_by.append(seen(trainer.rollouts.engine.model, learns))
    assert seen_by == [({torch.float32}, {torch.bfloat16})] * 2

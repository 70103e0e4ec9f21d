"""Fused decode steps against the model's own modules, with the torch twins of the kernels and with the kernels."""

import pytest
import torch

import oracle
from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.engine.fused_decoder import fusible
from alula.engine.fused_linear import fuse_projections
from alula.models.load import load_model
from fused import fuse

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PROMPTS = [list(range(5, 12)), [3, 4, 5]]
EVICT = {"budget": 10, "buffer": 4, "window": 3, "sinks": 2}
POLICIES = {
    "dense": Sparsity(),
    "rkv": Sparsity(Evict("rkv", **EVICT)),
    "h2o": Sparsity(Evict("h2o", **EVICT)),
    "quest": Sparsity(select=Select("quest", 12, block=4, dense_layers=1)),
    "streaming": Sparsity(Evict("streaming", **EVICT)),
    "both": Sparsity(Evict("snapkv", 20, buffer=4, window=3, sinks=2), Select("block-topk", 12, 4, 0)),
}
FAMILIES = {"llama": 1, "mistral": 4, "qwen2": 3, "qwen3": 2}


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels on the CPU; with a GPU tests/integration/test_gpu.py compares them"
)


@pytest.fixture
def differences(monkeypatch):
    """|log-prob by the modules − log-prob by fused steps| of the tokens that the modules sampled. What was sampled
    densely is sampled again: scoring it takes no decode steps."""

    def measure(loaded, policy, *, kernels=False, tokens=20, **options):
        settings = {"page": 4, "kv_memory": "2MiB", "max_rows": 4, **options}
        sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
        rollouts = Engine(loaded, **settings).generate(PROMPTS, sampling, policy)
        monkeypatch.setenv("ALULA_TRITON_INTERPRET", str(int(kernels)))
        engine = fuse(Engine(loaded, **settings))
        scores = engine.generate(PROMPTS, sampling) if policy.dense else engine.score(rollouts, policy)
        return torch.cat([(r.logprobs - s.logprobs).abs() for r, s in zip(rollouts, scores, strict=True)])

    return measure


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", POLICIES)
def test_fused_steps_equal_the_modules(name, family, differences):
    loaded = oracle.custom_model(FAMILIES[family], model_type=family)
    assert differences(loaded, POLICIES[name]).max() < 1e-5


@interpreted
@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"), [("rkv", "qwen2"), ("h2o", "llama"), ("quest", "qwen3"), ("both", "mistral")]
)
def test_fused_kernels_equal_the_modules(name, family, differences):
    loaded = oracle.custom_model(FAMILIES[family], model_type=family)
    assert differences(loaded, POLICIES[name], kernels=True, tokens=12).max() < 1e-5


@pytest.mark.parametrize("residual", [None, "float32"])
def test_fused_steps_round_where_the_modules_do(residual, differences):
    loaded = load_model("shape:tiny-qwen3", dtype="bfloat16", residual=residual)
    assert differences(loaded, POLICIES["streaming"]).max() < 1e-3


@pytest.mark.parametrize(
    "kernels",
    [False, pytest.param(True, marks=[interpreted, pytest.mark.kernels, pytest.mark.slow])],
    ids=["torch", "triton"],
)
def test_fused_steps_on_quantised_kv(kernels, differences):
    """A last bit of a key may round it to its other neighbour."""
    found = differences(oracle.custom_model(3), POLICIES["quest"], kernels=kernels, tokens=12, kv_dtype="int8")
    assert found.median() < 1e-5
    assert found.max() < 0.1


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *[(name, False) for name in ("streaming", "rkv", "h2o")],
        pytest.param("streaming", True, marks=[interpreted, pytest.mark.kernels, pytest.mark.slow]),
    ],
)
def test_texts_longer_than_the_kv_of_a_sequence(name, kernels, differences):
    """`max_length` limits KV tokens: an evicting sequence goes on, and its positions with it."""
    found = differences(oracle.custom_model(2), POLICIES[name], kernels=kernels, tokens=32, max_length=16)
    assert found.max() < 1e-5


def test_angles_grow_with_the_longest_text():
    """Not with the positions that the model knows, which may be a million."""
    engine, lengths = fuse(Engine(oracle.custom_model(2), page=4, kv_memory="2MiB", max_rows=4, max_length=16)), []
    for tokens, policy in ((8, "dense"), (32, "streaming"), (8, "dense")):
        engine.generate([[3, 4, 5]], Sampling(max_new_tokens=tokens, ignore_eos=True), POLICIES[policy])
        lengths.append(len(engine.runner._fused[False]._angles[0]))
    assert lengths == [16, 64, 64]


def test_a_later_turn_beyond_as_many_positions_as_the_vocabulary_has_tokens():
    results = []
    for prepare in (lambda engine: engine, fuse):
        engine = prepare(Engine(oracle.custom_model(2, vocabulary=24), page=4, kv_memory="2MiB", max_rows=4))
        sampling = Sampling(max_new_tokens=30, ignore_eos=True)
        (request,) = engine.requests([PROMPTS[0]], sampling, POLICIES["rkv"], session=True)
        engine.submit(request)
        (first,) = engine.drain()
        engine.extend(first.session, [3, 4, 5])
        results.append(engine.drain()[0])
    modules, fused = results
    assert fused.token_ids == modules.token_ids
    torch.testing.assert_close(fused.logprobs, modules.logprobs, atol=1e-5, rtol=0, equal_nan=True)


def test_models_with_other_layers_run_their_modules():
    for name in ("tiny-qwen3", "tiny-qwen3-moe"):
        model = load_model(f"shape:{name}").model
        assert not fusible(model), "projections are not fused yet"
        for layer in model.base_model.layers:
            fuse_projections(layer)
        assert fusible(model) == (name == "tiny-qwen3")
    model.base_model.layers[1].mlp.act_fn = torch.nn.GELU()
    assert not fusible(model)


def test_fused_steps_follow_new_weights_and_adapters():
    """The sparse weights are those of the adapter; `update_weights` writes the memory that fused steps read."""
    loaded = oracle.custom_model(2, model_type="qwen3")
    engine = fuse(Engine(loaded, page=4, kv_memory="2MiB", max_rows=4))
    before = engine.generate(PROMPTS, Sampling(max_new_tokens=8, ignore_eos=True))
    torch.manual_seed(7)
    other = oracle.custom_model(2, model_type="qwen3").model
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    engine.update_weights(other.named_parameters())
    after = engine.generate(PROMPTS, Sampling(max_new_tokens=8, ignore_eos=True), record=True)
    for old, new in zip(before, after):
        assert not torch.allclose(old.logprobs[1:], new.logprobs[1:])
        expected = oracle.logprobs(oracle.replay(other, new, 4), new)
        torch.testing.assert_close(new.logprobs, expected, rtol=0, atol=2e-5)

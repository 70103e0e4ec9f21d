"""On a CUDA device: captured and compiled steps equal eager ones and the CPU reference."""

import numpy as np
import pytest
import torch

from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.engine.model_runner import CapturedEviction
from alula.models.load import load_model
from alula.sparsity.evict import METHODS

pytestmark = pytest.mark.gpu

POLICIES = {
    "dense": Sparsity(),
    "rkv": Sparsity(evict=Evict("rkv", budget=48, buffer=16)),
    "h2o": Sparsity(evict=Evict("h2o", budget=48, buffer=16)),
    "block-topk": Sparsity(select=Select("block-topk", budget=64)),
    "quest & snapkv": Sparsity(Evict("snapkv", budget=96, buffer=16), Select("quest", budget=64)),
}


def rollouts(device: str, policy: Sparsity, prompts: list[list[int]], new_tokens: int, **options):
    loaded = load_model("shape:tiny-qwen3", dtype="float32")
    loaded.model.to(device)
    longest = max(map(len, prompts)) + new_tokens + 64
    engine = Engine(loaded, kv_memory="512MiB", max_rows=8, max_length=longest, **options)
    rollouts = engine.generate(
        prompts, Sampling(n=3, max_new_tokens=new_tokens, ignore_eos=True), policy, progress=False
    )
    assert engine.pool.in_use == 0
    captured = [graph for graph in engine.runner.graphs.values() if isinstance(graph, CapturedEviction)]
    assert bool(captured) == bool(policy.evict and engine.runner.use_graphs)
    return rollouts


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.token_ids == y.token_ids
        torch.testing.assert_close(x.logprobs, y.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", POLICIES)
def test_captured_and_compiled_steps_equal_eager_ones_and_the_cpu(name):
    prompts = [[3, 4, 5], list(range(2, 90))]
    eager = rollouts("cuda", POLICIES[name], prompts, 300, graphs=False, compiled=False)
    assert_same(eager, rollouts("cuda", POLICIES[name], prompts, 300))
    assert_same(eager, rollouts("cpu", POLICIES[name], prompts, 300))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", POLICIES)
def test_captured_steps_on_quantised_kv_equal_eager_ones(name, kv_dtype):
    """The same kernels read the same bytes. The CPU and compiled layers differ in last bits, which may round a value to
    its other neighbour: they are compared by what a replay says of the same tokens."""
    prompts = [[3, 4, 5], list(range(2, 90))]
    eager = rollouts("cuda", POLICIES[name], prompts, 300, graphs=False, compiled=False, kv_dtype=kv_dtype)
    captured = rollouts("cuda", POLICIES[name], prompts, 300, compiled=False, kv_dtype=kv_dtype)
    for a, b in zip(eager, captured, strict=True):
        assert a.token_ids == b.token_ids
        assert torch.equal(a.logprobs, b.logprobs)
    cpu = Engine(load_model("shape:tiny-qwen3", dtype="float32"), kv_memory="512MiB", kv_dtype=kv_dtype)
    replayed = torch.cat([score.logprobs for score in cpu.score(eager, POLICIES[name])])
    assert (replayed - torch.cat([r.logprobs for r in eager])).abs().median() < 1e-3


@pytest.mark.parametrize("residual", [None, "float32"])
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
def test_fused_steps_in_bfloat16_say_what_the_modules_say(shape, residual):
    """The tokens are the same; products of other sizes may round the other way."""
    policy = Sparsity(evict=Evict("streaming", budget=48, buffer=16))
    loaded = load_model(f"shape:{shape}", device="cuda", dtype="bfloat16", residual=residual)
    modules, fused = (Engine(loaded, kv_memory="512MiB", max_rows=8, compiled=c) for c in (False, True))
    assert fused.runner._fused
    assert not modules.runner._fused
    rollouts = modules.generate([[3, 4, 5]], Sampling(n=4, max_new_tokens=200, ignore_eos=True), policy, progress=False)
    scores = fused.score(rollouts, policy)
    differences = torch.cat([(r.logprobs - s.logprobs).abs() for r, s in zip(rollouts, scores, strict=True)])
    assert differences.median() < 0.01
    assert differences.max() < 0.2


@pytest.mark.parametrize("method", [name for name, evictor in METHODS.items() if not evictor.calibrated])
def test_captured_evictions_equal_eager_ones(method):
    policy, prompts = Sparsity(Evict(method, budget=48, buffer=16)), [[3, 4, 5], list(range(2, 90))]
    eager = rollouts("cuda", policy, prompts, 200, graphs=False, compiled=False)
    assert_same(eager, rollouts("cuda", policy, prompts, 200, compiled=False))


def test_texts_longer_than_the_kv_of_a_sequence():
    """Fused steps know the angles of all positions, not only of those that fit `max_length`."""
    policy, sampling = Sparsity(Evict("streaming", budget=48, buffer=16)), Sampling(max_new_tokens=300, ignore_eos=True)
    found = []
    for compiled in (False, True):
        loaded = load_model("shape:tiny-qwen3", device="cuda", dtype="float32")
        engine = Engine(loaded, kv_memory="64MiB", max_rows=4, max_length=96, compiled=compiled)
        found.append(engine.generate([[3, 4, 5]], sampling, policy, progress=False))
    assert_same(*found)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_graphs_equal_eager_at_16k_tokens(name):
    prompt = np.random.default_rng(0).integers(2, 128, 16000).tolist()
    eager = rollouts("cuda", POLICIES[name], [prompt], 600, graphs=False, compiled=False)
    assert_same(eager, rollouts("cuda", POLICIES[name], [prompt], 600))
    if POLICIES[name].evict:
        assert eager[0].kv.evictions > 30


def test_sleep_gives_the_memory_back_and_graphs_survive_it():
    loaded = load_model("shape:tiny-llama", device="cuda", dtype="float32")
    engine = Engine(loaded, kv_memory="4GiB", max_rows=8, compiled=False)
    ask = ([[1, 2, 3]], Sampling(max_new_tokens=120, ignore_eos=True), POLICIES["rkv"])
    before = engine.generate(*ask, progress=False)
    assert any(isinstance(graph, CapturedEviction) for graph in engine.runner.graphs.values())
    graphs = len(engine.runner.graphs)
    free = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - free >= 4 << 30
    engine.wake()
    assert_same(before, engine.generate(*ask, progress=False))
    assert len(engine.runner.graphs) == graphs

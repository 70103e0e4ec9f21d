"""Reported KV savings against the KV of a dense run of the same lengths; the matrix rate."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.bench.ceilings import matrix_rate
from alula.sparsity.policy import DENSE
from alula.trainer.step_metrics import dense_peak_bytes

PAGE = 4
POLICIES = {
    "dense": DENSE,
    "evict": Sparsity(evict=Evict("streaming", 24, buffer=8, window=4, sinks=1)),
    "select": Sparsity(select=Select("block-topk", 16, block=4)),
}


@pytest.fixture(scope="module", params=[32, 8], ids=["all at once", "in turns"])
def engine(request):
    return Engine.load("shape:tiny-llama", page=PAGE, kv_memory="64MiB", max_rows=request.param, max_length=160)


def generated(engine, policy, prompt, tokens, n):
    """Rollouts of four prompts, and the most bytes of pages in use."""
    engine.pool.peak = 0
    prompts = [[index + 2] * prompt for index in range(4)]
    rollouts = engine.generate(prompts, Sampling(n=n, max_new_tokens=tokens, ignore_eos=True, seed=0), policy)
    return rollouts, engine.pool.peak * PAGE * engine.geometry.kv_token_bytes


@pytest.mark.parametrize(("prompt", "tokens", "n", "pays"), [(8, 100, 8, True), (64, 24, 8, False), (60, 60, 1, True)])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.slow
def test_the_dense_peak_is_estimated_from_sparse_rollouts(engine, policy, prompt, tokens, n, pays):
    rollouts, peak = generated(engine, policy, prompt, tokens, n)
    _, dense_peak = generated(engine, DENSE, prompt, tokens, n)
    estimated = dense_peak_bytes(rollouts, engine.max_rows)
    assert estimated == pytest.approx(dense_peak, rel=0.1)
    if policy.evict is not None:
        assert (peak < estimated) == (peak < dense_peak) == pays


class Allocated(TorchDispatchMode):
    """Bytes of every storage that a torch operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes[result.data_ptr()] = result.untyped_storage().nbytes()
        return result


def test_the_matrix_rate_needs_three_matrices_and_nothing_else():
    """A GPU of 8 GB must be able to start a run: three bfloat16 matrices of the default size are 384 MiB."""
    with Allocated() as allocated:
        assert matrix_rate(torch.device("cpu")) > 0
    assert sorted(allocated.bytes.values()) == [4 * 1024 * 1024] * 3

"""The KV footprint against what the engine held, read and evicted, on random policies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula import Engine, Evict, Sampling, Schedule, Select, Sparsity
from alula.sparsity.footprint import footprint, most_held, selecting_layers, tokens_read, trigger
from alula.sparsity.select import METHODS

PAGE, NEW = 4, 40


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("shape:tiny-llama", page=PAGE, kv_memory="4MiB", max_rows=4)


def budgets(smallest: int) -> st.SearchStrategy[int | Schedule]:
    sizes = st.lists(st.integers(smallest, 48), min_size=1, max_size=4)
    return st.integers(smallest, 48) | st.builds(lambda b, width: Schedule(tuple(b), width), sizes, st.integers(3, 20))


EVICTORS = st.builds(
    lambda budget, buffer, window, sinks, protect: Evict(
        "streaming", budget, buffer=buffer, window=window, sinks=sinks, protect_prompt=protect
    ),
    budgets(6),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
)
SELECTORS = st.builds(
    lambda method, budget, dense: Select(method, budget, PAGE, dense),
    st.sampled_from(list(METHODS)),
    budgets(3 * PAGE),
    st.integers(0, 2),
)


@settings(max_examples=40, deadline=None)
@given(st.builds(Sparsity, st.none() | EVICTORS, st.none() | SELECTORS), st.integers(1, 30))
@pytest.mark.slow
def test_the_engine_holds_and_reads_the_footprint(engine, sparsity, prompt):
    sampling = Sampling(max_new_tokens=NEW, ignore_eos=True)
    [rollout] = engine.generate([list(range(1, prompt + 1))], sampling, sparsity, progress=False)
    steps = NEW - 1  # the first token comes with the prompt
    expected = footprint(sparsity, prompt, steps, engine.geometry.layers)
    kv, held, lengths = (
        rollout.kv,
        expected.held + 1,
        np.arange(prompt, prompt + steps) + 1,
    )  # with the token of this step
    assert kv.mean_tokens == pytest.approx(held.mean())
    assert kv.peak_tokens == max(prompt, held.max()) <= most_held(sparsity.evict, prompt, prompt + NEW)
    assert kv.dense_mean_tokens == pytest.approx(lengths.mean())
    assert kv.evictions == (expected.moved > 0).sum()
    read = held if sparsity.select is None else tokens_read(sparsity.select, lengths, held.astype(int))
    assert kv.mean_read_tokens == pytest.approx(np.mean(read))
    if sparsity.evict:
        assert (expected.held < trigger(sparsity.evict, prompt, lengths - 1)).all()


def test_selecting_layers():
    assert selecting_layers(None, 4) == 0
    assert [selecting_layers(Select("quest", 48, dense_layers=n), 4) for n in (0, 3, 4, 9)] == [4, 1, 0, 0]

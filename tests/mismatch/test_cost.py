"""Cost model: non-negative least squares, the fit, the paper's closed forms, integration over schedules."""

from dataclasses import asdict
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.cli.plan import cost_of
from alula.errors import SettingError
from alula.mismatch.plan.cost import (
    AnalyticCost,
    Hardware,
    Timing,
    features,
    fit,
    generation_cost,
    largest_batch,
    median_error,
    nnls,
)
from alula.models.geometry import Geometry
from alula.sparsity.footprint import footprint
from alula.sparsity.policy import DENSE, Evict, Select, Sparsity
from alula.sparsity.schedule import Schedule

GEOMETRIES = {
    "1.7b": Geometry(1_720_000_000, 28, 16, 8, 128),
    "4b": Geometry(4_020_000_000, 36, 32, 8, 128),
    "8b": Geometry(7_570_000_000, 36, 32, 8, 128),
}


def selecting(budget, **settings) -> Sparsity:
    return Sparsity(select=Select("block-topk", budget, **settings))


def best_over_all_subsets(a: np.ndarray, b: np.ndarray) -> float:
    """The smallest residual of any subset of columns whose free least-squares solution is non-negative."""
    best = float(b @ b)
    for size in range(1, a.shape[1] + 1):
        for columns in combinations(range(a.shape[1]), size):
            x = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(((a[:, columns] @ x - b) ** 2).sum()))
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 10), st.integers(1, 5))
def test_nnls_against_every_active_set(seed, rows, columns):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(rows, columns)) * 10.0 ** rng.integers(-3, 4, columns), rng.normal(size=rows)
    x = nnls(a, b)
    assert (x >= 0).all()
    assert ((a @ x - b) ** 2).sum() == pytest.approx(best_over_all_subsets(a, b), rel=1e-6, abs=1e-9)


def test_nnls_with_collinear_and_empty_columns():
    a = np.array([[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [3.0, 6.0, 0.0]])
    x = nnls(a, np.array([2.0, 4.0, 6.0]))
    assert a @ x == pytest.approx([2.0, 4.0, 6.0])


def machine_ms(geometry: Geometry, batch: float, read: float, scored: float) -> float:
    """A step of a machine that is not linear: rooflines, saturation with the batch size, launch latencies."""
    weights = max(geometry.parameters * 2 / 4.3e9, 2 * geometry.parameters * batch / 790e9)
    busy = batch * geometry.kv_heads / (batch * geometry.kv_heads + 40)
    attention = batch * read * geometry.kv_token_bytes / (3.6e9 * busy)
    select = (
        geometry.layers * (0.004 + 2e-6 * scored) + batch * scored * geometry.layers * geometry.kv_heads * 300 / 3e9
    )
    return 0.9 + weights + attention + (select if scored else 0)


def grid(geometry: Geometry, batches, contexts, noise: float, seed: int = 0) -> list[Timing]:
    rng = np.random.default_rng(seed)
    timings = []
    for batch in batches:
        for context in contexts:
            for budget in (None, 512, 2048, 4096):
                if budget is None or budget < context:
                    read = (
                        context if budget is None else (2 * context + (geometry.layers - 2) * budget) / geometry.layers
                    )
                    scored = 0 if budget is None else (geometry.layers - 2) / geometry.layers * context / 16
                    ms = machine_ms(geometry, batch, read, scored) * np.exp(noise * rng.normal())
                    timings.append(Timing(batch, context, read, scored, ms))
    return timings


@pytest.mark.parametrize("size", GEOMETRIES)
def test_fit_predicts_unseen_steps(size):
    geometry = GEOMETRIES[size]
    cost = fit(grid(geometry, (1, 4, 16, 32, 64), (1024, 4096, 16384, 32768), 0.02), geometry)
    held_out = grid(geometry, (2, 8, 24, 48), (2048, 8192, 24576), 0.02, seed=1)
    assert median_error(cost, held_out) <= 0.06
    assert min(cost.constants.values()) >= 0


def test_fit_recovers_the_constants_of_a_linear_machine():
    geometry = GEOMETRIES["1.7b"]
    true = {"fixed": 1.5, "rows_tflop": 2.0, "kv_gb": 0.25, "select": 0.02, "scored_mpages": 0.4}
    true["moved_gb"] = 2 * true["kv_gb"]  # no eviction is timed, so it is taken to read and write at the KV's rate
    rng = np.random.default_rng(0)
    timings = []
    for _ in range(60):
        batch, read, scored = rng.integers(1, 64), rng.integers(100, 9000), rng.integers(0, 2) * rng.integers(1, 2000)
        terms = features(geometry, batch, read, scored)
        ms = sum(true.get(name, 0) * float(term) for name, term in terms.items())
        timings.append({"batch": batch, "context": 1, "kv_read": read, "pages_scored": scored, "ms": ms, "gpu": "x"})
    fitted = fit(timings, geometry)
    fixed = fitted.constants.pop("fixed") + fitted.constants.pop("weights_gb") * 3.44  # one model: not separable
    assert fixed == pytest.approx(1.5, rel=1e-6)
    for name, value in fitted.constants.items():
        assert value == pytest.approx(true.get(name, 0), rel=1e-5, abs=1e-7)


def test_fit_raises_on_bad_timings():
    with pytest.raises(SettingError, match=r"timings: .* at least 5"):
        fit([Timing(1, 1, 1, 0, 1.0)], GEOMETRIES["4b"])
    with pytest.raises(SettingError, match="'kv_read' is missing"):
        fit([{"batch": 1, "context": 1, "pages_scored": 0, "ms": 1.0}], GEOMETRIES["4b"])


def test_analytic_equals_the_papers_totals():
    """Sums over steps against the closed forms of section 3.3 (without a prompt, whose terms have typos in print)."""
    geometry, rows, out, page, budget = GEOMETRIES["8b"], 8, 4000, 16, 1024
    hardware = Hardware(989, 4.8)
    cost = AnalyticCost(geometry, hardware)
    width, group = geometry.layers * geometry.kv_heads * geometry.head_dim, geometry.query_heads / geometry.kv_heads
    intensity = hardware.tflops / hardware.terabytes_per_second * geometry.value_bytes
    lengths = np.arange(out)

    def flops(ms: np.ndarray) -> float:
        return float(ms.sum()) / 1e3 * hardware.tflops * 1e12

    weights = geometry.parameters * out * (2 * rows + intensity)
    dense = weights + group * out**2 * rows * width + intensity * rows * out**2 * width
    assert flops(cost.step_ms(rows, lengths, 0)) == pytest.approx(dense, rel=1e-3)

    reading = 2 * group * rows * width * budget * out + 2 * intensity * rows * width * budget * out
    scoring = (group + intensity) * rows * width * out**2 / (2 * page)
    sparse = flops(cost.step_ms(rows, np.full(out, budget), lengths / page))
    assert sparse == pytest.approx(weights + reading + scoring, rel=1e-3)


@pytest.mark.parametrize(("size", "batch", "floor"), [("1.7b", 35, 3.2), ("4b", 26, 2.7), ("8b", 26, 2.4)])
def test_floors_of_the_published_schedules(size, batch, floor):
    """Traffic alone at 4.3 TB/s, two dense layers, 32k tokens, the largest batch that dense fits."""
    cost = AnalyticCost(GEOMETRIES[size], Hardware(1e9, 4.3))
    sparse = selecting(Schedule.load(f"qwen3-{size}-0.86"), block=16, dense_layers=2)
    dense_ms = generation_cost(cost, DENSE, batch=batch, prompt=0, new_tokens=32_000).ms
    assert dense_ms / generation_cost(cost, sparse, batch=batch, prompt=0, new_tokens=32_000).ms == pytest.approx(
        floor, abs=0.05
    )


def test_footprint_of_an_evictor():
    evict = Evict("streaming", Schedule((20, 40), width=50), buffer=8, window=2, sinks=1)
    per_step = footprint(Sparsity(evict=evict), prompt=10, new_tokens=70, layers=4)
    cached, held, moved = 10, [], []
    for length in range(10, 80):
        budget = 20 if length < 50 else 40
        moved.append(cached if cached >= budget + 8 else 0)
        cached = budget if cached >= budget + 8 else cached
        held.append(cached)
        cached += 1
    assert per_step.held.tolist() == held
    assert per_step.moved.tolist() == moved
    assert sum(m > 0 for m in moved) >= 3
    assert max(held) < 48
    assert (per_step.read == per_step.held).all()
    assert per_step.scored.sum() == 0


def test_a_protected_prompt_is_outside_the_budget():
    evict = Evict("streaming", 20, buffer=8, window=2, sinks=1, protect_prompt=True)
    per_step = footprint(Sparsity(evict=evict), prompt=100, new_tokens=60, layers=4)
    assert per_step.held.max() == 127
    assert per_step.held[28] == 120


def test_footprint_of_a_selector():
    schedule = Schedule((64, 96), width=100)
    per_step = footprint(selecting(schedule, block=16, dense_layers=1), prompt=50, new_tokens=100, layers=4)
    for i, length in enumerate(range(50, 150)):
        budget = 64 if length < 100 else 96
        assert per_step.held[i] == length
        assert per_step.read[i] == pytest.approx((length + 3 * min(budget, length)) / 4)
        assert per_step.scored[i] == (0.75 * -(-length // 16) if budget < length else 0)


def test_evict_and_select_together_read_less_than_they_hold():
    both = Sparsity(
        evict=Evict("streaming", 64, buffer=16, window=2, sinks=1),
        select=Select("block-topk", 48, block=16, dense_layers=0),
    )
    per_step = footprint(both, prompt=10, new_tokens=200, layers=2)
    assert per_step.held.max() == 79
    assert per_step.read.max() == 48


def test_memory_and_the_batch_that_fits():
    cost = AnalyticCost(GEOMETRIES["1.7b"], Hardware.named("h200"))
    at = {"prompt": 100, "new_tokens": 900}
    one = generation_cost(cost, DENSE, batch=1, **at)
    assert one.peak_kv_bytes == 999 * 114_688
    assert one.read_share == 1
    rows = largest_batch(cost, DENSE, kv_bytes=1e9, **at)
    assert rows == int(1e9 // (999 * 114_688))
    evict = Sparsity(evict=Evict("streaming", 128, buffer=32, window=2))
    assert largest_batch(cost, evict, kv_bytes=1e9, **at) > 6 * rows
    with pytest.raises(SettingError, match="one row of 1000 tokens"):
        largest_batch(cost, DENSE, kv_bytes=1e6, **at)
    for method, vectors in {"block-topk": 1, "quest": 2}.items():
        select = Sparsity(select=Select(method, 128))
        summarised = generation_cost(cost, select, batch=1, **at)
        assert summarised.peak_kv_bytes == (999 + 63 * vectors / 2) * 114_688
        assert footprint(select, layers=28, **at).scored[-1] == pytest.approx(63 * vectors * 26 / 28)


def test_geometry_of_a_model():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    for tied in (True, False):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=tied))
        geometry = Geometry.of(model)
        total = sum(p.numel() for p in model.parameters())
        assert geometry == Geometry(total if tied else total - 3200, 3, 4, 2, 8, 4)


def test_impossible_hardware_gives_a_hint():
    with pytest.raises(SettingError, match=r"^hardware=h20: known: h200, h100, a100\.$"):
        Hardware.named("h20")
    calibration = SimpleNamespace(notes={"shape": asdict(GEOMETRIES["4b"])})
    for text in ("0,4.8", "989,nan", "fast,4.8"):
        with pytest.raises(SettingError, match=f"^--hardware {text}: write TFLOPS"):
            cost_of(calibration, None, text)

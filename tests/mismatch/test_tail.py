"""Tails against brute force, and coverage of the cluster bootstrap compared with resampling tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.errors import RunFailed, SettingError
from alula.mismatch.tail import (
    MIN_PROMPTS,
    lower_quantile,
    resampled_quantiles,
    simultaneous_band,
    small_sample_factor,
    tail,
)


def quantile_by_counting(values, q):
    for value in sorted(values):
        if sum(v <= value for v in values) >= q * len(values) - 1e-9:
            return value
    raise AssertionError


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1, width=16), min_size=1, max_size=60), st.sampled_from([0.01, 0.05, 0.2, 0.5]))
def test_quantile_by_counting(values, q):
    assert lower_quantile(np.array(values), q) == quantile_by_counting(values, q)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 60), st.sampled_from([0.05, 0.25]))
def test_a_resample_is_the_quantile_of_the_repeated_prompts(seed, prompts, tokens, q):
    rng = np.random.default_rng(seed)
    values, prompt_of = rng.random(tokens).round(2), rng.integers(0, prompts, tokens)
    draws = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=5)
    quantiles = resampled_quantiles(values, prompt_of, draws, q)
    for draw, quantile in zip(draws, quantiles):
        repeated = [v for v, i in zip(values, prompt_of) for _ in range(draw[i])]
        if repeated:
            assert quantile == quantile_by_counting(repeated, q)
        else:
            assert np.isnan(quantile)


def test_cut_points_lose_little_in_a_large_bin():
    rng = np.random.default_rng(0)
    values, prompt_of = rng.beta(8, 0.5, 40_000), rng.integers(0, 30, 40_000)
    draws = rng.multinomial(30, np.full(30, 1 / 30), size=3)
    exact = [lower_quantile(np.repeat(values, draw[prompt_of]), 0.05) for draw in draws]
    assert resampled_quantiles(values, prompt_of, draws, 0.05) == pytest.approx(exact, abs=1e-3)


@pytest.mark.slow
def test_bins_counts_and_flags():
    rng = np.random.default_rng(0)
    positions = np.concatenate([np.arange(250)] * 30 + [np.arange(250, 320)] * 5)
    prompts = np.concatenate([np.repeat(np.arange(30), 250), np.repeat(np.arange(5), 70)])
    alpha = rng.beta(8, 0.5, len(positions))
    result = tail(alpha, positions, prompts, width=100, bins=5)
    assert result.tokens.tolist() == [3000, 3000, 1500 + 250, 100, 0]
    assert result.prompts.tolist() == [30, 30, 30, 5, 0]
    assert result.enough.tolist() == [True, True, True, False, False]
    for j in range(3):
        inside = alpha[positions // 100 == j]
        assert result.value[j] == quantile_by_counting(inside, 0.05)
        assert result.lower[j] < result.value[j] < result.upper[j]
    assert np.isnan(result.value[4])
    assert result.overall == quantile_by_counting(alpha, 0.05)
    assert result[0].enough
    assert [estimate.prompts for estimate in result] == [30, 30, 30, 5, 0]
    merged = tail(alpha, positions, prompts, width=100, bins=2)
    assert merged.tokens.tolist() == [3000, len(alpha) - 3000]


def test_equal_values_give_a_point_and_bad_input_raises():
    result = tail(np.ones(60), np.zeros(60, dtype=int), np.arange(60))
    assert result.value[0] == 1
    assert (result.lower[0], result.upper[0]) == pytest.approx((1, 1), abs=1e-5)
    with pytest.raises(SettingError, match="alpha: no tokens"):
        tail([], np.zeros(0, dtype=int), [])
    with pytest.raises(SettingError, match="quantile=5"):
        tail([1.0], [0], [0], quantile=5)
    with pytest.raises(RunFailed, match="acceptance is not a number"):
        tail([1.0, np.nan], [0, 0], [0, 1])


def test_one_prompt_gives_no_bounds():
    result = tail(np.linspace(0.8, 1, 100), np.zeros(100, dtype=int), np.zeros(100, dtype=int))
    assert (result.lower[0], result.upper[0]) == (0.0, 1.0)


def test_thin_bins_do_not_widen_the_others():
    rng = np.random.default_rng(0)
    n = 40
    alpha = rng.beta(6, 0.5, (n, 100))
    prompts = np.repeat(np.arange(n), 100)
    alone = tail(alpha.ravel(), np.zeros(n * 100, dtype=int), prompts, width=10)
    thin = MIN_PROMPTS - 1
    both = tail(
        np.concatenate([alpha.ravel(), alpha[:thin].ravel()]),
        np.concatenate([np.zeros(n * 100, dtype=int), np.full(thin * 100, 10)]),
        np.concatenate([prompts, prompts[: thin * 100]]),
        width=10,
    )
    assert both.lower[0] == pytest.approx(alone.lower[0])


def test_small_sample_factor_follows_students_t():
    for n, t in {11: 2.228, 21: 2.086, 61: 2.000}.items():  # two-sided 95 % points from a printed table
        assert small_sample_factor(n, 0.95) == pytest.approx(np.sqrt(n / (n - 1)) * t / 1.95996, rel=0.004)


BINS, TOKENS = 6, 120


def clustered(prompts: int, rng: np.random.Generator) -> np.ndarray:
    """α [prompt, bin, token]: most tokens at 1, the rest Beta, both depending on the prompt's difficulty."""
    hard = 0.8 * rng.normal(size=(prompts, 1, 1)) + 0.6 * rng.normal(size=(prompts, BINS, 1))
    share = 1 / (1 + np.exp(1.2 + 0.05 * np.arange(BINS)[None, :, None] - 0.6 * hard))
    touched = rng.random((prompts, BINS, TOKENS)) < share
    return np.where(touched, rng.beta(6 * np.exp(-0.3 * hard), 0.5, size=touched.shape), 1.0)


@pytest.fixture(scope="module")
def truth() -> np.ndarray:
    many = clustered(6000, np.random.default_rng(1))
    return np.array([lower_quantile(many[:, j].ravel(), 0.05) for j in range(BINS)])


def coverage(prompts: int, clusters: bool, truth: np.ndarray, repeats: int = 100) -> float:
    """How often the band of all bins together contains the truth in every bin."""
    hits = 0
    bins = np.broadcast_to(np.arange(BINS)[None, :, None], (prompts, BINS, TOKENS)).ravel()
    owner = np.broadcast_to(np.arange(prompts)[:, None, None], (prompts, BINS, TOKENS)).ravel()
    units = owner if clusters else np.arange(len(owner))  # one cluster per token: the plain bootstrap
    for seed in range(repeats):
        alpha = clustered(prompts, np.random.default_rng(100 + seed))
        if clusters:
            result = tail(alpha.ravel(), bins, units, width=1, resamples=400)
            lower, upper = result.lower, result.upper
        else:
            lower, upper = token_band(alpha, np.random.default_rng(seed))
        hits += bool(((lower <= truth) & (truth <= upper)).all())
    return hits / repeats


def token_band(alpha: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The same max-t band from resampled tokens."""
    pooled = alpha.transpose(1, 0, 2).reshape(BINS, -1)
    estimate = np.array([lower_quantile(row, 0.05) for row in pooled])
    size = pooled.shape[1]
    resampled = np.stack(
        [[lower_quantile(row[rng.integers(0, size, size)], 0.05) for row in pooled] for _ in range(60)]
    )
    return simultaneous_band(estimate, resampled, np.full(BINS, size), 0.95)


@pytest.mark.slow
def test_band_covers_all_bins_at_once(truth):
    """Nominal 95 %, simultaneous over bins; 100 repeats have a standard error of 2 points."""
    assert coverage(24, True, truth) >= 0.89
    assert coverage(64, True, truth) >= 0.89


@pytest.mark.slow
def test_resampling_tokens_undercovers(truth):
    assert coverage(48, False, truth, repeats=30) <= 0.5


def test_bins_whose_tail_never_moves_do_not_make_the_others_certain():
    """24 prompts agree in the first bin; the 19 that reach the second are a thin bin, and its band is not a point."""
    rng = np.random.default_rng(0)
    first, later = np.ones(24 * 20), rng.beta(8, 2, 19 * 20)
    prompts = np.concatenate([np.repeat(np.arange(24), 20), np.repeat(np.arange(19), 20)])
    positions = np.concatenate([np.zeros(24 * 20, int), np.full(19 * 20, 10)])
    result = tail(np.concatenate([first, later]), positions, prompts, width=10)
    alone = tail(later, np.full(19 * 20, 0), np.repeat(np.arange(19), 20), width=10)
    assert result.lower[0] == pytest.approx(result.upper[0], abs=1e-5)
    assert result.lower[1] < result.value[1] < result.upper[1]
    assert result.upper[1] - result.lower[1] == pytest.approx(alone.upper[0] - alone.lower[0], rel=0.2)

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.errors import SettingError
from alula.objective import ragged
from alula.objective.correction import PRESETS, Correction, correct
from alula.objective.mismatch_metrics import correction_metrics, mismatch_metrics, percentiles
from rollout_batches import Batch, batches, flat, padded

QUICK = settings(max_examples=40, deadline=None)


def xi(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def vetoed(row: list[float], threshold: float = 1e-4) -> int:
    return next((t for t, log_ratio in enumerate(row) if log_ratio < math.log(threshold)), -1)


def code_mean(rows: list[list[float]]) -> float:
    """The released code's normaliser: mean of min(ξ, 1.5) over every token, dropped ones included."""
    capped = [min(xi(value), 1.5) for row in rows for value in row]
    return sum(capped) / len(capped)


def by_hand(name: str, rows: list[list[float]]) -> tuple[list[list[float]], list[bool]]:
    """Each preset written out: weights of every token (0 where dropped) and which rollouts are not dropped entirely."""
    weights, keep = [], []
    for row in rows:
        first, product = vetoed(row), xi(sum(row))
        mean = xi(sum(row) / max(len(row), 1))
        match name:
            case "none":
                weights.append([1.0 for _ in row])
                keep.append(True)
            case "sparse-rl" | "reroll":
                weights.append([xi(value) if first < 0 else 0.0 for value in row])
                keep.append(first < 0)
            case "strict":
                kept = vetoed(row, 1e-3) < 0
                weights.append([float(kept) for _ in row])
                keep.append(kept)
            case "prefix-only":
                weights.append([xi(value) if first < 0 or t < first else 0.0 for t, value in enumerate(row)])
                keep.append(first != 0)
            case "sparse-rl-code":
                norm = code_mean(rows)
                inside = [0.5 <= xi(value) <= 1.5 and first < 0 for value in row]
                weights.append([min(xi(value), 1.5) / norm if ok else 0.0 for value, ok in zip(row, inside)])
                keep.append(first < 0)
            case "tis":
                weights.append([min(xi(value), 2.0) for value in row])
                keep.append(True)
            case "mis":
                weights.append([product if product <= 3.0 else 0.0 for _ in row])
                keep.append(product <= 3.0)
            case "icepop":
                weights.append([xi(value) if 0.5 <= xi(value) <= 5.0 else 0.0 for value in row])
                keep.append(True)
            case "geometric":
                weights.append([1.0 if 0.99 <= mean <= 1.01 else 0.0 for _ in row])
                keep.append(0.99 <= mean <= 1.01)
    return weights, keep


def corrected(batch: Batch, correction: Correction, **kwargs):
    return correct(
        flat(batch.dense), flat(batch.sparse), batch.sequence, correction, sequences=batch.rollouts, **kwargs
    )


def metrics_of(batch: Batch, correction: Correction, **kwargs):
    log_ratio = flat(batch.dense) - flat(batch.sparse)
    metrics = mismatch_metrics(log_ratio, batch.sequence, batch.rollouts, correction.veto, correction.clamp, **kwargs)
    return metrics | correction_metrics(corrected(batch, correction), **kwargs)


@pytest.mark.parametrize("name", PRESETS)
@QUICK
@given(batch=batches())
def test_preset_equals_a_loop(name, batch):
    result = corrected(batch, PRESETS[name])
    weights, keep = by_hand(name, batch.log_ratios())
    torch.testing.assert_close(result.weights, flat(weights), rtol=1e-12, atol=0)
    assert result.token_keep.tolist() == [weight > 0 for row in weights for weight in row]
    assert result.keep.tolist() == keep
    first = {None: lambda row: -1, 1e-4: vetoed, 1e-3: lambda row: vetoed(row, 1e-3)}[PRESETS[name].veto]
    assert result.first_vetoed.tolist() == [first(row) for row in batch.log_ratios()]


@pytest.mark.parametrize("name", PRESETS)
@QUICK
@given(batch=batches())
def test_padded_input_is_flattened_and_back(name, batch):
    dense, mask = padded(batch.dense)
    sparse, _ = padded(batch.sparse, fill=99.0)  # padding may hold anything
    sequence, *logprobs = ragged.flatten(mask, dense, sparse)
    result = correct(*logprobs, sequence, PRESETS[name], sequences=len(mask))
    expected = corrected(batch, PRESETS[name])
    weights, token_keep = (ragged.unflatten(values, mask) for values in (result.weights, result.token_keep))
    assert torch.equal(weights[mask], expected.weights)
    assert torch.equal(token_keep[mask], expected.token_keep)
    assert not weights[~mask].any()
    assert not token_keep[~mask].any()
    assert torch.equal(result.keep, expected.keep)


@QUICK
@given(batch=batches())
def test_metrics_are_taken_before_masking(batch):
    rows = batch.log_ratios()
    values = [value for row in rows for value in row]
    xis = [xi(value) for value in values]
    metrics = metrics_of(batch, Correction.sparse_rl())
    expected = {
        "veto_rate": sum(vetoed(row) >= 0 for row in rows) / len(rows),
        "veto_rate_token": sum(value < math.log(1e-4) for value in values) / len(values),
        "kl_k1": -sum(values) / len(values),
        "kl_k3": sum(x - 1 - math.log(x) for x in xis) / len(xis),
        "ess": sum(xis) ** 2 / (len(xis) * sum(x * x for x in xis)),
        "rejected": sum(vetoed(row) >= 0 for row in rows) / len(rows),
        "masked_token": sum(len(row) for row in rows if vetoed(row) >= 0) / len(values),
        "capped_token": 0.0,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    for percent in (1, 5, 50, 95, 99):
        quantile = torch.tensor(xis, dtype=torch.float64).quantile(percent / 100).item()
        assert metrics[f"xi_p{percent:02}"] == pytest.approx(quantile, rel=1e-9)
    shared = expected.keys() - {"rejected", "masked_token", "capped_token"}
    for correction in PRESETS.values():  # what is dropped later changes no measurement
        others = metrics_of(batch, correction)
        at_threshold = (
            {"veto_rate", "veto_rate_token"} if correction.veto == 1e-3 else set()
        )  # taken at its own threshold
        assert all(others[name] == metrics[name] for name in shared - at_threshold)


@pytest.mark.parametrize("level", ["none", "sequence", "geometric"])
def test_a_rollout_whose_prefix_is_trained_is_not_dropped(level):
    """The last token of rollout 0 is vetoed, the first of rollout 1; the mask, if there is one, drops rollout 2."""
    log_xi = torch.tensor([0.0, 0.0, -12.0, -12.0, 0.0, 2.0, 2.0])
    band = {} if level == "none" else {"mask": level, "mask_high": 3.0}
    correction = Correction.named("prefix-only", **band)
    result = correct(log_xi, torch.zeros(7), torch.tensor([0, 0, 0, 1, 1, 2, 2]), correction)
    assert result.keep.tolist() == [True, False, level == "none"]
    assert result.token_keep.tolist() == [True, True, False, False, False, *[level == "none"] * 2]


def test_shares_of_capped_and_masked_tokens():
    log_xi = torch.tensor([0.0, math.log(1.7), math.log(0.3), math.log(3.0)])
    result = correct(log_xi, torch.zeros(4), torch.tensor([0, 0, 1, 1]), Correction.sparse_rl_code())
    metrics = correction_metrics(result)
    assert metrics["capped_token"] == 0.5
    assert metrics["masked_token"] == 0.75
    assert metrics["rejected"] == 0.0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@QUICK
@given(batch=batches(), data=st.data())
def test_batch_normalisation_is_per_optimizer_step_and_over_ranks(level, batch, data):
    steps = data.draw(st.lists(st.integers(0, 1), min_size=batch.rollouts, max_size=batch.rollouts))
    correction = Correction(weight=level, cap=1.5, batch_normalise=True)
    weights = corrected(batch, correction, step=torch.tensor(steps)).weights.split(batch.lengths)
    rows = batch.log_ratios()
    level_of = {
        "token": lambda row: [xi(value) for value in row],
        "sequence": lambda row: [xi(sum(row))] * len(row),
        "geometric": lambda row: [xi(sum(row) / len(row))] * len(row),
    }[level]
    capped = [[min(value, 1.5) for value in level_of(row)] if row else [] for row in rows]
    for i, row in enumerate(capped):
        mates = [capped[j] for j in range(len(rows)) if steps[j] == steps[i] and capped[j]]
        values = [v for mate in mates for v in mate] if level == "token" else [mate[0] for mate in mates]
        if row:
            mean = sum(values) / len(values)
            expected = torch.tensor(row, dtype=torch.float64) / (mean if mean > 1e-8 else 1.0)
            torch.testing.assert_close(weights[i], expected, rtol=1e-12, atol=0)

    # Two ranks with half of the rollouts each, and an all-reduce between them.
    if batch.rollouts > 1 and len(set(steps)) == 2:
        halves = [range(0, batch.rollouts // 2), range(batch.rollouts // 2, batch.rollouts)]
        parts = [_part(batch, half) for half in halves]
        if all(part.sequence.numel() and 1 in [steps[i] for i in half] for part, half in zip(parts, halves)):
            mine = [torch.tensor([steps[i] for i in half]) for half in halves]
            results = on_ranks(2, lambda r, reduce, _: corrected(parts[r], correction, step=mine[r], reduce=reduce))
            joined = torch.cat([result.weights for result in results])
            torch.testing.assert_close(joined, torch.cat(weights), rtol=1e-12, atol=0)
            metrics = metrics_of(batch, correction)
            for result in on_ranks(2, lambda r, reduce, gather: metrics_of(parts[r], correction, gather=gather)):
                assert result == pytest.approx(metrics, rel=1e-9)


def _part(batch: Batch, rows: range) -> Batch:
    return Batch(*([getattr(batch, field.name)[i] for i in rows] for field in dataclasses.fields(Batch)))


def on_ranks(count: int, action):
    """`action(rank, reduce, gather)` on several ranks at once, a thread each, that meet for every collective."""
    meet, given_ = threading.Barrier(count), [None] * count

    def run(rank: int):
        def gather(value):
            given_[rank] = value
            meet.wait(10)
            values = list(given_)
            meet.wait(10)
            return values

        return action(rank, lambda tensor: torch.stack(gather(tensor.clone())).sum(0), gather)

    with ThreadPoolExecutor(count) as ranks:
        return list(ranks.map(run, range(count)))


@pytest.mark.parametrize("name", PRESETS)
@QUICK
@given(batch=batches())
def test_equal_policies_are_left_alone_bit_for_bit(name, batch):
    sparse = flat(batch.sparse).float()
    result = correct(sparse.clone(), sparse, batch.sequence, PRESETS[name], sequences=batch.rollouts)
    assert torch.equal(result.weights, torch.ones_like(sparse))
    assert result.keep.all()
    metrics = mismatch_metrics(sparse - sparse, batch.sequence, batch.rollouts)
    assert (metrics["kl_k3"], metrics["ess"]) == (0.0, 1.0)


def test_interleaved_tokens_keep_their_own_order():
    log_xi = torch.tensor([0.0, -11.0, 0.1, 0.0, -12.0, -12.0])
    result = correct(log_xi, torch.zeros(6), torch.tensor([1, 2, 1, 2, 0, 1]), Correction.prefix(), sequences=4)
    assert result.first_vetoed.tolist() == [0, 2, 0, -1]
    assert result.token_keep.tolist() == [True, False, True, False, False, False]
    assert result.keep.tolist() == [False, True, False, True]


def test_weights_carry_no_gradient():
    dense = torch.zeros(3, requires_grad=True)
    assert not correct(dense, torch.ones(3), torch.zeros(3, dtype=torch.int64), Correction.tis()).weights.requires_grad


def test_a_dense_probability_of_zero_is_vetoed_not_nan():
    log_ratio, sequence = torch.tensor([-math.inf, 0.0]), torch.tensor([0, 1])
    result = correct(log_ratio, torch.zeros(2), sequence, Correction.sparse_rl())
    assert result.weights.tolist() == [0.0, 1.0]
    assert mismatch_metrics(log_ratio, sequence, 2)["kl_k3"] == pytest.approx((math.exp(-20) - 1 + 20) / 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
def test_percentiles_equal_torch_quantile(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    expected = tensor.quantile(torch.tensor([0.01, 0.05, 0.5, 0.95, 0.99], dtype=torch.float64))
    torch.testing.assert_close(percentiles(tensor), expected)


def test_percentiles_are_those_of_all_ranks_together_with_one_collective():
    """Ranks of unequal size whose percentiles differ from those of all tokens; one rank has no token."""
    values = [torch.randn(301).double(), torch.rand(57).double() - 3, torch.empty(0).double()]
    calls = []

    def measured(rank, _, gather):
        def counting(value):
            calls.append(rank)
            return gather(value)

        sequence = torch.zeros(len(values[rank]), dtype=torch.int64)
        return mismatch_metrics(values[rank], sequence, int(len(sequence) > 0), gather=counting)

    results = on_ranks(3, measured)
    assert sorted(calls) == [0, 1, 2]
    expected = torch.cat(values).exp()
    alone = mismatch_metrics(values[0], torch.zeros(301, dtype=torch.int64), 1)
    for percent in (1, 5, 50, 95, 99):
        name, quantile = f"xi_p{percent:02}", expected.quantile(percent / 100).item()
        assert [one[name] for one in results] == pytest.approx([quantile] * 3)
        assert alone[name] != pytest.approx(quantile), "one rank alone would measure something else"


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"cap": 2.0}, r"cap=2\.0 .*weight"),
        ({"batch_normalise": True}, "batch_normalise=true: .*weight"),
        ({"mask": "token"}, "mask=token: .*mask_low"),
        ({"mask_high": 2.0}, r"mask_high=2\.0: .*mask"),
        ({"mask": "token", "mask_low": 2.0, "mask_high": 1.0}, r"mask_low=2\.0 .*mask_high=1\.0"),
        ({"reroll": True}, "reroll .*veto"),
        ({"veto": 1e-4, "reroll": True, "prefix_only": True}, "prefix_only and reroll"),
        ({"weight": "tokens"}, "'token'"),
        ({"inner": "acepted"}, "'accepted'"),
        ({"veto": 0.0}, "veto=0.0"),
        ({"veto": 2}, r"^veto=2\.0: should be below 1; a token with equal probabilities has ξ = 1.$"),
        ({"veto": 1.0}, r"veto=1\.0: should be below 1"),
        ({"mask": "token", "mask_low": 1.5, "mask_high": 2.0}, r"mask_low=1\.5: should be below 1"),
        ({"mask": "geometric", "mask_low": 0.5, "mask_high": 0.9}, r"mask_high=0\.9: should be above 1"),
        ({"weight": "token", "cap": 0.5}, r"cap=0\.5: should be at least 1"),
    ],
)
def test_a_contradictory_correction_raises(settings_, message):
    with pytest.raises(SettingError, match=message):
        Correction(**settings_)


def test_presets_by_name():
    assert Correction.named("tis", cap=5.0) == Correction.tis(5.0)
    assert Correction.named("mis", mask_low=0.5, mask_high=2.0) == Correction.mis(high=2.0, low=0.5)
    with pytest.raises(SettingError, match="sparse-rl"):
        Correction.named("sparserl")
    with pytest.raises(SettingError, match="veto"):
        Correction.named("sparse-rl", vetoo=1e-3)

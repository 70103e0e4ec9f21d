import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_correction import by_hand, code_mean, vetoed, xi

from alula.errors import SettingError
from alula.objective import ragged
from alula.objective.correction import PRESETS, Correction, correct
from alula.objective.losses import LOSSES, LossInputs, register
from alula.objective.policy_loss import Divisors, divisors, merge_metrics, policy_loss
from alula.objective.settings import Loss, check
from rollout_batches import Batch, batches, flat, padded, random_batch

QUICK = settings(max_examples=12, deadline=None)
MAX_LENGTH = 9
CASES = {name: Loss(name) for name in LOSSES} | {
    "grpo+kl": Loss("grpo", clip_low=0.1, clip_high=0.3, kl=0.05, kl_clamp=0.4),
    "grpo+dual": Loss("grpo", dual_clip=3.0),
    "dr_grpo": Loss("dr_grpo", kl=0.01),
    "dapo": Loss("dapo", kl=0.02),
    "gspo": Loss("gspo", clip_low=0.05, clip_high=0.07, kl=0.01),
    "cispo": Loss("cispo", clip_low=0.5, clip_high=0.3),
}


def allowed(loss: Loss, correction: Correction) -> bool:
    try:
        check(loss, correction)
    except SettingError:
        return False
    return True


PAIRS = [(loss, correction) for loss in CASES for correction in PRESETS if allowed(CASES[loss], PRESETS[correction])]


def ours(batch: Batch, loss: Loss, correction: Correction, leaf: torch.Tensor, old: str = "dense"):
    corrected = correct(flat(batch.dense), flat(batch.sparse), batch.sequence, correction, sequences=batch.rollouts)
    parts = divisors(loss, correction, batch.sequence, batch.rollouts, corrected, max_length=MAX_LENGTH)
    return policy_loss(
        leaf,
        {"dense": flat(batch.dense), "new": leaf.detach()}[old],
        torch.tensor(batch.advantages, dtype=torch.float64)[batch.sequence],
        corrected.weights,
        batch.sequence,
        loss,
        parts,
        reference_logprobs=flat(batch.reference),
        kl_mask=corrected.token_keep if correction.mask_kl else None,
    )


def by_loop(
    batch: Batch,
    loss: Loss,
    weights: list[list[float]],
    leaf: torch.Tensor,
    old: list[list[float]],
    inner: str = "all",
    outer: str = "all",
    keep: list[bool] | None = None,
    mask_kl: bool = False,
) -> torch.Tensor:
    """The losses as their papers write them: one rollout, one token at a time, on fp64 scalars."""
    low, high = loss.clip
    keep = keep or [True] * batch.rollouts
    rollouts = max(sum(keep), 1) if outer == "accepted" else batch.rollouts
    accepted = [sum(weight > 0 for weight in row) for row in weights]
    counted = accepted if inner == "accepted" else batch.lengths
    step_tokens = sum(n for n, kept in zip(counted, keep) if kept or outer == "all")
    total, kl_total, offset = leaf.sum() * 0, leaf.sum() * 0, 0
    for i in range(batch.rollouts):
        length, advantage = batch.lengths[i], batch.advantages[i]
        new = [leaf[offset + t] for t in range(length)]
        offset += length
        policy, kl = leaf.sum() * 0, leaf.sum() * 0
        rollout_log_ratio = sum(new[t] - old[i][t] for t in range(length)) / max(length, 1)
        for t in range(length):
            ratio = torch.exp(rollout_log_ratio if loss.loss == "gspo" else new[t] - old[i][t])
            clipped = torch.clamp(ratio, 1 - low, 1 + high)
            if loss.loss == "cispo":
                objective = clipped.detach() * advantage * new[t]
            else:
                objective = torch.min(ratio * advantage, clipped * advantage)
            if loss.dual_clip is not None and advantage < 0 and objective < loss.dual_clip * advantage:
                objective = torch.tensor(loss.dual_clip * advantage, dtype=torch.float64)
            if weights[i][t] > 0:
                policy = policy - weights[i][t] * objective
            distance = new[t] - batch.reference[i][t]
            k3 = torch.exp(-distance) - 1 + distance
            if loss.kl_clamp is not None:
                k3 = torch.clamp(k3, -loss.kl_clamp, loss.kl_clamp)
            if weights[i][t] > 0 or not mask_kl:
                kl = kl + k3
        if loss.loss in ("grpo", "gspo"):
            total = total + policy / max(counted[i], 1) / rollouts
            kl_total = kl_total + (
                kl / max(counted[i], 1) / rollouts if mask_kl else kl / max(length, 1) / batch.rollouts
            )
        elif loss.loss == "dr_grpo":
            total = total + policy / MAX_LENGTH / rollouts
            kl_total = kl_total + kl / MAX_LENGTH / (rollouts if mask_kl else batch.rollouts)
        else:
            total = total + policy / max(step_tokens, 1)
            kl_total = kl_total + kl / max(step_tokens if mask_kl else sum(batch.lengths), 1)
    return total + loss.kl * kl_total


def assert_same_with_gradient(mine, theirs, my_leaf, their_leaf):
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    mine.backward()
    theirs.backward()
    torch.testing.assert_close(my_leaf.grad, their_leaf.grad, rtol=1e-10, atol=1e-12)


def leaves(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return flat(batch.new).requires_grad_(), flat(batch.new).requires_grad_()


@pytest.mark.parametrize(("loss", "correction"), PAIRS)
@QUICK
@given(batch=batches())
@pytest.mark.slow
def test_loss_and_gradient_equal_a_loop(loss, correction, batch):
    mine, theirs = leaves(batch)
    preset = PRESETS[correction]
    weights, keep = by_hand(correction, batch.log_ratios())
    expected = by_loop(
        batch, CASES[loss], weights, theirs, batch.dense, preset.inner, preset.outer, keep, preset.mask_kl
    )
    assert_same_with_gradient(ours(batch, CASES[loss], preset, mine)[0], expected, mine, theirs)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("inner", ["all", "accepted"])
@pytest.mark.parametrize("outer", ["all", "accepted"])
@pytest.mark.parametrize("mask_kl", [False, True])
@settings(max_examples=8, deadline=None)
@given(batch=batches())
def test_every_divisor_setting_equals_a_loop(kind, inner, outer, mask_kl, batch):
    loss = CASES[kind]
    name = "geometric" if kind == "gspo" else "sparse-rl"
    correction = Correction.named(name, inner=inner, outer=outer, mask_kl=mask_kl)
    if not allowed(loss, correction):
        return
    mine, theirs = leaves(batch)
    weights, keep = by_hand(name, batch.log_ratios())
    expected = by_loop(batch, loss, weights, theirs, batch.dense, inner, outer, keep, mask_kl)
    assert_same_with_gradient(ours(batch, loss, correction, mine)[0], expected, mine, theirs)


@QUICK
@given(batch=batches())
def test_released_sparse_rl_code(batch):
    """L = 1/N Σ_i Σ_t m w max(−ρA, −clip(ρ)A) / max(1, Σ m) + 1e-4 · (the same mean of clamp(k3, ±10))."""
    mine, leaf = leaves(batch)
    norm, total, offset = code_mean(batch.log_ratios()), leaf.sum() * 0, 0
    for i, row in enumerate(batch.log_ratios()):
        policy, kl, accepted = leaf.sum() * 0, leaf.sum() * 0, 0
        for t, log_ratio in enumerate(row):
            new = leaf[offset + t]
            weight = min(xi(log_ratio), 1.5) / norm
            accept = 0.5 <= xi(log_ratio) <= 1.5 and vetoed(row) < 0
            ratio, advantage = torch.exp(new - batch.dense[i][t]), batch.advantages[i]
            surrogate = torch.max(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
            distance = new - batch.reference[i][t]
            if accept:
                accepted += 1
                policy = policy + weight * surrogate
                kl = kl + torch.clamp(torch.exp(-distance) - 1 + distance, -10, 10)
        offset += len(row)
        total = total + (policy + 1e-4 * kl) / max(1, accepted) / batch.rollouts
    loss, _ = ours(batch, Loss("grpo", kl=1e-4, kl_clamp=10.0), Correction.sparse_rl_code(), mine)
    assert_same_with_gradient(loss, total, mine, leaf)


@pytest.mark.parametrize(("loss", "correction"), PAIRS)
@QUICK
@given(batch=batches(), data=st.data())
@pytest.mark.slow
def test_micro_batches_add_up_to_the_step(loss, correction, batch, data):
    settings_, preset = CASES[loss], PRESETS[correction]
    at_once, split = leaves(batch)
    corrected = correct(flat(batch.dense), flat(batch.sparse), batch.sequence, preset, sequences=batch.rollouts)
    parts = divisors(settings_, preset, batch.sequence, batch.rollouts, corrected, max_length=MAX_LENGTH)
    expected, whole_metrics = ours(batch, settings_, preset, at_once)
    of = data.draw(st.lists(st.integers(0, 2), min_size=batch.rollouts, max_size=batch.rollouts))
    total, metrics = split.sum() * 0, []
    for part in range(3):
        rows = torch.tensor([i for i in range(batch.rollouts) if of[i] == part], dtype=torch.int64)
        tokens = torch.isin(batch.sequence, rows)
        if not tokens.any():
            continue
        loss_part, metrics_part = policy_loss(
            split[tokens],
            flat(batch.dense)[tokens],
            torch.tensor(batch.advantages, dtype=torch.float64)[batch.sequence][tokens],
            corrected.weights[tokens],
            torch.searchsorted(rows, batch.sequence[tokens]),
            settings_,
            parts.rows(rows),
            reference_logprobs=flat(batch.reference)[tokens],
            kl_mask=corrected.token_keep[tokens] if preset.mask_kl else None,
        )
        total = total + loss_part
        metrics.append(metrics_part)
    assert_same_with_gradient(total, expected, split, at_once)
    merged = merge_metrics(metrics)
    assert merged.keys() == whole_metrics.keys()
    for name, value in whole_metrics.items():
        assert merged[name] == pytest.approx(value.item(), rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("loss", CASES)
@QUICK
@given(batch=batches(), data=st.data())
def test_divisors_count_each_optimizer_step_and_every_rank(loss, batch, data):
    settings_, correction = CASES[loss], Correction(veto=1e-4, outer="accepted")
    steps = data.draw(st.lists(st.integers(0, 1), min_size=batch.rollouts, max_size=batch.rollouts))
    dense, sparse = flat(batch.dense), flat(batch.sparse)
    corrected = correct(dense, sparse, batch.sequence, correction, sequences=batch.rollouts)

    def counted(sequence, rollouts, corrected, **options):
        return divisors(settings_, correction, sequence, rollouts, corrected, max_length=MAX_LENGTH, **options)

    both = counted(batch.sequence, batch.rollouts, corrected, step=torch.tensor(steps))
    for step in set(steps):
        rows = torch.tensor([i for i in range(batch.rollouts) if steps[i] == step])
        tokens = torch.isin(batch.sequence, rows)
        sequence = torch.searchsorted(rows, batch.sequence[tokens])
        alone = correct(dense[tokens], sparse[tokens], sequence, correction, sequences=len(rows))
        one = counted(sequence, len(rows), alone)
        assert torch.equal(both.policy[rows], one.policy)
        assert torch.equal(both.kl[rows], one.kl)
    # Two ranks that hold the same batch: every count over the step doubles.
    doubled = counted(batch.sequence, batch.rollouts, corrected, reduce=lambda sums: 2 * sums)
    single = counted(batch.sequence, batch.rollouts, corrected)
    assert torch.equal(doubled.kl, 2 * single.kl)
    if corrected.keep[batch.sequence].any():
        assert torch.equal(doubled.policy, 2 * single.policy)


@pytest.mark.parametrize(("loss", "correction"), PAIRS)
@QUICK
@given(batch=batches())
def test_equal_policies_give_the_uncorrected_loss_bit_for_bit(loss, correction, batch):
    """Budget ≥ length: sparse log-probs are the dense ones, and every correction is `none`."""
    same = dataclasses.replace(batch, sparse=batch.dense)
    corrected_leaf, plain_leaf = leaves(batch)
    with_it, _ = ours(same, CASES[loss], PRESETS[correction], corrected_leaf)
    without, _ = ours(same, CASES[loss], Correction.none(), plain_leaf)
    assert with_it.item() == without.item()
    with_it.backward()
    without.backward()
    assert torch.equal(corrected_leaf.grad, plain_leaf.grad)


@pytest.mark.parametrize("loss", CASES)
@QUICK
@given(batch=batches())
def test_skipped_scoring_is_the_loss_with_old_equal_to_new(loss, batch):
    mine, theirs = leaves(batch)
    result, metrics = ours(batch, CASES[loss], Correction.none(), mine, old="new")
    weights, _ = by_hand("none", batch.log_ratios())
    assert_same_with_gradient(result, by_loop(batch, CASES[loss], weights, theirs, batch.new), mine, theirs)
    assert metrics["clip_fraction"] == 0


def test_first_update_of_sparse_rl_is_the_importance_weighted_policy_gradient():
    """At ρ = 1 the gradient is −ξ A ∇log π / (|o| N), by hand on numbers."""
    new = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    sequence = torch.tensor([0, 0, 1])
    sparse = new.detach() - torch.tensor([math.log(2.0), math.log(0.5), math.log(3.0)], dtype=torch.float64)
    corrected = correct(new, sparse, sequence, Correction.sparse_rl())
    parts = divisors(Loss("grpo"), Correction.sparse_rl(), sequence, 2, corrected)
    advantages = torch.tensor([1.0, 1.0, -4.0], dtype=torch.float64)
    policy_loss(new, new.detach(), advantages, corrected.weights, sequence, Loss("grpo"), parts)[0].backward()
    torch.testing.assert_close(new.grad, torch.tensor([-0.5, -0.125, 6.0], dtype=torch.float64))


def test_a_dropped_token_adds_nothing_even_when_its_ratio_overflows():
    new = torch.tensor([0.0, -1.0], requires_grad=True)
    parts = Divisors(torch.ones(1).double(), torch.ones(1).double())
    old, weights = torch.tensor([-math.inf, -1.0]), torch.tensor([0.0, 1.0])
    for kind in ("grpo", "cispo"):
        new.grad = None
        loss, _ = policy_loss(new, old, torch.ones(2), weights, torch.tensor([0, 0]), Loss(kind), parts)
        loss.backward()
        assert torch.isfinite(loss)
        assert new.grad.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("loss", "new", "old", "reference", "advantage", "slope"),
    [
        (Loss("grpo"), -2.0, -100.0, None, 1.0, 0.0),
        (Loss("gspo"), -2.0, -100.0, None, 1.0, 0.0),
        (Loss("dapo", dual_clip=3.0), -2.0, -100.0, None, -1.0, 0.0),
        (Loss("grpo", kl=0.1, kl_clamp=10.0), -100.0, -100.0, -2.0, 1.0, -1.0),
    ],
)
def test_a_bounded_loss_has_a_gradient_when_the_ratio_overflows(loss, new, old, reference, advantage, slope):
    """A nan would skip the whole step."""
    new = torch.tensor([new, -1.0], requires_grad=True)
    parts = Divisors(torch.ones(2).double(), torch.ones(2).double())
    result, _ = policy_loss(
        new,
        torch.tensor([old, -1.0]),
        torch.tensor([advantage, 1.0]),
        torch.ones(2),
        torch.tensor([0, 1]),
        loss,
        parts,
        reference_logprobs=None if reference is None else torch.tensor([reference, -1.0]),
    )
    result.backward()
    assert torch.isfinite(result)
    assert new.grad.tolist() == [slope, -1.0]


def test_metrics_on_numbers():
    new = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    old = torch.log(torch.tensor([0.25, 0.25, 0.8, 0.5]))  # ratios 2, 2, 0.625, 1
    parts = Divisors(torch.ones(1).double(), torch.ones(1).double())
    _, metrics = policy_loss(
        new,
        old,
        torch.tensor([1.0, -1.0, -1.0, 1.0]),
        torch.tensor([1.0, 0.0, 1.0, 1.0]),
        torch.zeros(4, dtype=torch.int64),
        Loss("grpo", dual_clip=1.5),
        parts,
        entropies=torch.arange(4.0),
    )
    expected = {
        "tokens": 4,
        "clip_fraction": 0.5,
        "update_kl": (2 * (1 - math.log(2)) + 0.625 - 1 - math.log(0.625)) / 4,
        "entropy": 1.5,
    }
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value), name


def test_a_step_with_nothing_accepted_is_a_zero_loss():
    sequence, new = torch.tensor([0, 0, 1]), torch.zeros(3, requires_grad=True)
    for name, kind in (("sparse-rl-code", "grpo"), ("sparse-rl", "dapo")):
        correction = Correction.named(name, outer="accepted")
        corrected = correct(torch.full((3,), -30.0), torch.zeros(3), sequence, correction)
        parts = divisors(Loss(kind), correction, sequence, 2, corrected)
        loss, _ = policy_loss(new, new.detach(), torch.ones(3), corrected.weights, sequence, Loss(kind), parts)
        loss.backward()
        assert loss.item() == 0.0
        assert not new.grad.any()


@pytest.mark.parametrize(
    ("loss", "correction", "skip_scoring"),
    [
        (Loss("gspo"), Correction.sparse_rl(), False),
        (Loss("gspo"), Correction.named("icepop", weight="none"), False),
        (Loss("gspo"), Correction(veto=1e-4, prefix_only=True), False),
        (Loss("dr_grpo"), Correction.sparse_rl_code(), False),
        (Loss("grpo"), Correction.sparse_rl_code(), True),
        (Loss("grpo"), Correction.rerolled(), True),
        (Loss("grpo"), Correction.named("sparse-rl", vetoed_in_baseline=False), True),
        (Loss("grpo"), Correction.named("sparse-rl", outer="accepted"), True),
        (Loss("dapo"), Correction.named("sparse-rl", inner="accepted"), True),
    ],
)
def test_meaningless_combinations_raise(loss, correction, skip_scoring):
    with pytest.raises(SettingError):
        check(loss, correction, skip_scoring=skip_scoring)


def test_meaningful_combinations_pass():
    check(Loss("gspo"), Correction.named("geometric", veto=1e-4))
    check(Loss("gspo"), Correction.mis())
    check(Loss("grpo"), Correction.sparse_rl(), skip_scoring=True)
    assert len(PAIRS) == 5 * 10 + 9 + 4  # token losses with all, dr_grpo without the released code's, gspo with 4


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"loss": "gsp"}, "'gspo'"),
        ({"loss": "cispo", "dual_clip": 9.0}, r"dual_clip=9\.0.*cispo"),
        ({"dual_clip": 1.1}, r"dual_clip=1\.1"),
        ({"clip_low": 1.5}, r"clip_low=1\.5"),
        ({"clip_high": -0.1}, r"clip_high=-0\.1"),
        ({"kl": -1.0}, r"kl=-1\.0"),
    ],
)
def test_an_invalid_loss_raises(settings_, message):
    with pytest.raises(SettingError, match=message):
        Loss(**settings_)


def test_dr_grpo_needs_the_generation_limit():
    with pytest.raises(SettingError, match="max_length=None"):
        divisors(Loss("dr_grpo"), Correction.none(), torch.zeros(1, dtype=torch.int64), 1)


@pytest.mark.parametrize("name", LOSSES)
def test_the_first_gradient_of_every_loss_is_the_policy_gradient(name):
    """At ρ = 1 the gradient is −A ∇log π / divisor, for any clip."""
    new = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    sequence, advantages = torch.tensor([0, 0, 1]), torch.tensor([1.0, -4.0], dtype=torch.float64)
    parts = divisors(Loss(name), Correction.none(), sequence, 2, max_length=MAX_LENGTH)
    ones = torch.ones(3, dtype=torch.float64)
    policy_loss(new, new.detach(), advantages[sequence], ones, sequence, Loss(name), parts)[0].backward()
    torch.testing.assert_close(new.grad, -(advantages / parts.policy)[sequence])


def test_a_new_loss_is_one_function():
    @register("reinforce", clip=(1.0, 1.0), divisor="step", pessimistic=False)
    def reinforce(inputs: LossInputs) -> torch.Tensor:
        return inputs.advantages * inputs.logprobs

    try:
        new, sequence = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([0, 0])
        loss = Loss("reinforce")
        parts = divisors(loss, Correction.none(), sequence, 1)
        value, metrics = policy_loss(new, torch.zeros(2), torch.ones(2), torch.ones(2), sequence, loss, parts)
        assert value.item() == 1.5
        assert metrics["clip_fraction"] == 0
        with pytest.raises(SettingError, match=r"dual_clip=3\.0"):
            Loss("reinforce", dual_clip=3.0)
    finally:
        del LOSSES["reinforce"]


def test_kl_without_reference_raises():
    parts = Divisors(torch.ones(1), torch.ones(1))
    one = torch.zeros(1)
    with pytest.raises(SettingError, match="reference"):
        policy_loss(one, one, one, one, torch.zeros(1, dtype=torch.int64), Loss(kl=0.1), parts)


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "one": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    shape = LlamaConfig(vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    trainer = trl.GRPOTrainer(
        model=LlamaForCausalLM(shape),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=9,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "one"}] * 4),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    )
    trainer.model.eval()  # no division by accumulation steps
    return trainer


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_equal_trl(trl_trainer, kind, seed):
    """TRL takes a correction's weights folded into 2-D advantages; its cispo bounds the ratio above only."""
    batch = random_batch([3, 1, 6, 4], seed, spread=0.3, bad=0.1)
    correction = Correction.none() if kind == "gspo" else Correction.tis()
    loss = Loss(kind, clip_low=1.0 if kind == "cispo" else 0.2, clip_high=0.3)
    mine = flat(batch.new).requires_grad_()
    result, _ = ours(batch, loss, correction, mine)

    trl_trainer.loss_type = "grpo" if kind == "gspo" else kind
    trl_trainer.importance_sampling_level = "sequence" if kind == "gspo" else "token"
    trl_trainer.epsilon_low, trl_trainer.epsilon_high = 0.2, 1.3 if kind == "cispo" else 0.3
    new, mask = padded(batch.new, fill=0.0)
    dense, _ = padded(batch.dense, fill=0.0)
    weights = correct(flat(batch.dense), flat(batch.sparse), batch.sequence, correction).weights
    theirs = new.requires_grad_()
    trl_trainer._get_per_token_logps_and_entropies = lambda *_, **__: (theirs, torch.zeros_like(new), None)
    ids = torch.full(mask.shape, 2)
    expected = trl_trainer._compute_loss(
        trl_trainer.model,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones(len(mask), 1, dtype=torch.int64),
            "completion_ids": ids,
            "completion_mask": mask.long(),
            "advantages": torch.tensor(batch.advantages).double()[:, None] * ragged.unflatten(weights, mask),
            "old_per_token_logps": dense,
            "num_items_in_batch": mask.sum(),
        },
    )
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)
    result.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, theirs.grad[mask], rtol=1e-6, atol=1e-9)

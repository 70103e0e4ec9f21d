"""The distiller: KL and acceptance by their formulas, what a step changes, and held-out acceptance."""

import copy
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import oracle
from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.distill.distiller import Acceptance, Distiller
from alula.distill.divergence import compare, compare_policies
from alula.distill.run_stage import RunDistiller
from alula.distributed import World
from alula.errors import SettingError
from alula.models.lora import Adapter
from alula.objective.settings import Loss
from alula.run.checkpoint import Checkpoints
from alula.settings import DistillSettings
from distill_runs import successor_model

PROMPTS = [list(range(5, 12)), [3, 4, 5], [9, 8] * 13, [7]]
SAMPLING = Sampling(n=2, max_new_tokens=20, temperature=0.8, ignore_eos=True)
RKV = Sparsity(Evict("rkv", 10, buffer=4, window=3, sinks=2))


@pytest.fixture(scope="module")
def model_and_rollouts():
    """A tiny model and rollouts of it."""
    loaded = oracle.custom_model(3)
    engine = Engine(loaded, page=4, kv_memory="2MiB", max_rows=16)
    return loaded, engine.generate(PROMPTS, SAMPLING, RKV, record=True)


def distiller_of(model, **settings) -> Distiller:
    settings = {"rank": 4, "lr": 3e-3, "activation_checkpointing": False, "token_budget": 120, "chunk": 13} | settings
    world, loss = settings.pop("world", None), settings.pop("policy", None)
    return Distiller(model, DistillSettings(**settings), loss=loss, world=world)


def bits(parameters) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parameters]


# --- KL and acceptance ------------------------------------------------------------------------------------------------


def two_policies(n=5, vocabulary=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lq, lp = (torch.randn(n, vocabulary, generator=generator).mul(1.5).log_softmax(-1) for _ in range(2))
    return lq, lp


def test_kl_and_acceptance_by_hand():
    lq, lp = two_policies()
    targets = torch.tensor([0, 3, 8, 1, 1])
    logprobs, kl, alpha, *_ = compare(lq, lp, targets, temperature=1.0)
    for i in range(5):
        q, p = lq[i].exp().tolist(), lp[i].exp().tolist()
        assert kl[i].item() == pytest.approx(sum(a * np.log(a / b) for a, b in zip(q, p)), abs=1e-6)
        assert alpha[i].item() == pytest.approx(sum(map(min, q, p)), abs=1e-6)
        assert logprobs[i].item() == pytest.approx(lq[i, targets[i]].item(), abs=1e-6)


def test_chunked_comparison_equals_plain_autograd():
    torch.manual_seed(0)
    hidden, teacher, weight, bias = torch.randn(17, 6), torch.randn(17, 6), torch.randn(23, 6), torch.randn(23)
    targets, temperature = torch.randint(0, 23, (17,)), 0.7
    lp = ((teacher @ weight.T + bias) / temperature).log_softmax(-1)
    first, second = (hidden.clone().requires_grad_() for _ in range(2))

    lq = ((first @ weight.T + bias) / temperature).log_softmax(-1)
    sampled, kl = lq.gather(-1, targets[:, None])[:, 0], (lq.exp() * (lq - lp)).sum(-1)
    compared = compare_policies(second, teacher, (weight, bias), targets, temperature, chunk=4)
    torch.testing.assert_close(compared.kl, kl)
    torch.testing.assert_close(compared.logprobs, sampled)
    torch.testing.assert_close(compared.acceptance, torch.minimum(lq.exp(), lp.exp()).sum(-1))
    assert not compared.acceptance.requires_grad
    mix = torch.randn(2, 17)
    (mix[0] * sampled + mix[1] * kl).sum().backward()
    (mix[0] * compared.logprobs + mix[1] * compared.kl).sum().backward()
    torch.testing.assert_close(second.grad, first.grad, rtol=1e-4, atol=1e-5)


# --- a step -----------------------------------------------------------------------------------------------------------


def test_step_trains_only_the_adapter(model_and_rollouts):
    loaded, rollouts = model_and_rollouts
    theta, flags = bits(loaded.model.parameters()), [p.requires_grad for p in loaded.model.parameters()]
    distiller = distiller_of(loaded.model, minibatches=2)
    before = distiller.measure(rollouts)
    metrics = [distiller.step(rollouts) for _ in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(theta, bits(loaded.model.parameters())))
    assert [p.requires_grad for p in loaded.model.parameters()] == flags
    assert all(p.grad is None for p in loaded.model.parameters())
    assert distiller.steps == 12
    assert metrics[-1]["kl"] < 0.9 * metrics[0]["kl"]
    assert metrics[0]["acceptance_mean"] == pytest.approx(before.mean, abs=0.02)
    assert distiller.measure(rollouts).mean > before.mean


def test_first_policy_gradient_is_that_of_advantage_times_logprob(model_and_rollouts):
    """At the sampling policy ρ = 1: the gradient is d/dφ of −Σ A log q / (|o| · rollouts), and nothing is clipped."""
    loaded, rollouts = model_and_rollouts
    advantages = torch.linspace(-1, 2, len(rollouts))
    distiller = distiller_of(loaded.model, weight=0.0, max_grad_norm=None)
    gradients = {}
    distiller.optimizer.step = lambda *_: (  # type: ignore[method-assign]
        gradients.update({n: m.grad.clone() for n, m in distiller.optimizer.masters.items()}),
        (0.0, True),
    )[1]
    metrics = distiller.step(rollouts, advantages)
    assert metrics["drift"] < 1e-4
    assert metrics["clip_fraction"] == 0
    reference = distiller_of(loaded.model)
    with reference.policy.dense_frozen():
        for batch in reference._batches(rollouts, range(len(rollouts))):
            logits = reference.policy(batch, rollouts) @ reference.policy.head[0].T / SAMPLING.temperature
            logprobs = logits.log_softmax(-1).gather(-1, batch.target_ids[:, None])[:, 0]
            for i, row in zip(batch.index, batch.split(logprobs)):
                (-advantages[i] * row.mean() / len(rollouts)).backward(retain_graph=True)
    for name, parameter in reference.policy.adapter_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0])
def test_loss_is_policy_loss_plus_weighted_divergence(model_and_rollouts, weight):
    loaded, rollouts = model_and_rollouts
    metrics = distiller_of(loaded.model, weight=weight).step(rollouts, torch.linspace(-1, 2, len(rollouts)))
    assert metrics["kl"] > 0.01
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + weight * metrics["kl"], rel=1e-5)


def test_policy_loss_has_no_reference_kl(model_and_rollouts):
    """The KL penalty of the run's loss is ignored: ρ compares with the recorded log-probs only."""
    loaded, rollouts = model_and_rollouts
    advantages = torch.linspace(-1, 2, len(rollouts))
    penalised, plain = (
        distiller_of(loaded.model, policy=loss, weight=0.0).step(rollouts, advantages) for loss in (Loss(kl=0.3), None)
    )
    for name in ("policy_loss", "loss", "grad_norm"):
        assert penalised[name] == plain[name]
    assert plain["loss"] == plain["policy_loss"]


def test_policy_loss_raises_logprobs_of_rewarded_rollouts(model_and_rollouts):
    loaded, rollouts = model_and_rollouts
    advantages = torch.tensor([1.0, -1.0] * (len(rollouts) // 2))
    distiller = distiller_of(loaded.model, weight=0.0, policy=Loss(clip_low=0.9, clip_high=9.0))
    before = distiller.score(rollouts)
    for _ in range(5):
        distiller.step(rollouts, advantages)
    change = [float((b - a).mean()) for a, b in zip(before, distiller.score(rollouts))]
    assert min(change[::2]) > max(change[1::2])


def test_resumed_distiller_continues_bit_for_bit(model_and_rollouts, tmp_path):
    loaded, rollouts = model_and_rollouts
    advantages = torch.linspace(-1, 1, len(rollouts))
    uninterrupted, first, second = (distiller_of(loaded.model, minibatches=2) for _ in range(3))
    uninterrupted.step(rollouts, advantages)
    first.step(rollouts, advantages)
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, first.tensors(), {"distill": first.state()})
    second.resume(checkpoints.load(path, second.tensors())["distill"])
    for one in (uninterrupted, second):
        one.step(rollouts, advantages)
    for (_, a), (_, b) in zip(uninterrupted.policy.adapter_parameters(), second.policy.adapter_parameters()):
        assert torch.equal(a, b)
    assert second.state() == uninterrupted.state()


def test_saved_adapter_can_be_trained_further_and_served(model_and_rollouts, tmp_path):
    loaded, rollouts = model_and_rollouts
    trained = distiller_of(loaded.model)
    trained.step(rollouts)
    trained.adapter().save(tmp_path)
    again = Distiller(loaded.model, trained.settings, adapter=Adapter.load(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(trained.score(rollouts), again.score(rollouts)))
    engine = Engine(loaded, page=4, kv_memory="2MiB", max_rows=16, sparse_adapter=tmp_path)
    served = engine.generate(PROMPTS, SAMPLING, RKV, record=True)
    for logprobs, rollout in zip(again.score(served), served):
        torch.testing.assert_close(logprobs, rollout.logprobs, rtol=0, atol=1e-4)


def test_non_finite_loss_leaves_the_adapter_unchanged(model_and_rollouts):
    loaded, rollouts = model_and_rollouts
    distiller = distiller_of(loaded.model)
    before = bits(p for _, p in distiller.policy.adapter_parameters())
    metrics = distiller.step(rollouts, torch.full((len(rollouts),), torch.nan))
    assert metrics["skipped"] == 1
    assert distiller.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before, bits(p for _, p in distiller.policy.adapter_parameters())))


@dataclass(frozen=True)
class Threads(World):
    """Ranks as threads of one process."""

    board: list | None = None
    barrier: threading.Barrier | None = None

    def all_gather(self, value):
        self.board[self.rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    def all_max(self, value):
        return max(self.all_gather(value))

    def all_sum(self, tensor):
        return tensor.copy_(torch.stack([t.to(tensor) for t in self.all_gather(tensor.clone())]).sum(0))


def two_ranks(model, **settings) -> list[Distiller]:
    board, barrier = [None, None], threading.Barrier(2)
    worlds = [Threads(rank, 2, board=board, barrier=barrier) for rank in range(2)]
    return [distiller_of(copy.deepcopy(model), world=world, **settings) for world in worlds]


def on_each(ranks, call) -> list:
    """What `call(rank's object, rank)` returns, in one thread per rank."""
    results = [None] * len(ranks)

    def run(rank):
        results[rank] = call(ranks[rank], rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    return results


def test_two_ranks_train_like_one(model_and_rollouts):
    loaded, rollouts = model_and_rollouts
    advantages = torch.linspace(-1, 1, len(rollouts))
    alone = distiller_of(loaded.model)
    expected = alone.step(rollouts, advantages)
    shares = [[0, 1, 2, 3, 4], [5, 6, 7]]
    ranks = two_ranks(loaded.model)
    metrics = on_each(ranks, lambda one, i: one.step([rollouts[j] for j in shares[i]], advantages[shares[i]]))
    for rank in range(2):
        for name in ("loss", "kl", "policy_loss", "grad_norm", "tokens"):
            assert metrics[rank][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
        for (_, a), (_, b) in zip(alone.policy.adapter_parameters(), ranks[rank].policy.adapter_parameters()):
            torch.testing.assert_close(a, b, rtol=0, atol=0.05 * alone.settings.lr)


def test_a_minibatch_without_rollouts_leaves_the_adapter_to_the_others(model_and_rollouts):
    """Three minibatches of two rollouts: AdamW's momentum moves nothing in the empty one, on one rank and on two."""
    loaded, rollouts = model_and_rollouts
    alone, ranks = distiller_of(loaded.model, minibatches=3), two_ranks(loaded.model, minibatches=3)
    expected = alone.step(rollouts[:2])
    metrics = on_each(ranks, lambda one, i: one.step(rollouts[i : i + 1]))
    assert expected["tokens"] == sum(map(len, rollouts[:2]))
    for rank in range(2):
        assert ranks[rank].steps == alone.steps == 2
        for name in ("loss", "kl", "grad_norm", "tokens"):
            assert metrics[rank][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
        for (_, a), (_, b) in zip(alone.policy.adapter_parameters(), ranks[rank].policy.adapter_parameters()):
            torch.testing.assert_close(a, b, rtol=0, atol=0.05 * alone.settings.lr)


def test_a_step_without_chosen_prompts_changes_nothing(model_and_rollouts, monkeypatch):
    loaded, rollouts = model_and_rollouts
    ranks = two_ranks(loaded.model)
    on_each(ranks, lambda one, i: one.step(rollouts[4 * i : 4 * i + 4]))  # momentum
    before = bits(p for _, p in ranks[0].policy.adapter_parameters())
    monkeypatch.setattr(Distiller, "is_chosen", lambda self, index: False)
    runs = [RunDistiller(one, None, one.settings, []) for one in ranks]
    assert on_each(runs, lambda run, i: run.step(1, rollouts[4 * i : 4 * i + 4], torch.zeros(4))) == [{}, {}]
    assert ranks[0].steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, bits(p for _, p in ranks[0].policy.adapter_parameters())))


@pytest.fixture(scope="module")
def successor():
    return successor_model()


@pytest.mark.parametrize(
    "policy",
    [
        Sparsity(Evict("snapkv", 10, buffer=4, window=4, sinks=2)),
        Sparsity(select=Select("block-topk", 8, block=2, dense_layers=0)),
    ],
    ids=["snapkv", "block-topk"],
)
@pytest.mark.slow
def test_distillation_raises_acceptance_on_held_out_prompts(policy, successor):
    loaded, train, held_out = successor
    distiller = distiller_of(loaded.model, rank=8, lr=4e-3, minibatches=2, token_budget=4096, chunk=1024)
    engine = Engine(loaded, page=2, kv_memory="4MiB", max_rows=32, sparse_adapter=distiller.adapter())

    def on_held_out():
        rollouts = engine.generate(held_out, Sampling(max_new_tokens=10, seed=99), policy)
        return Acceptance.of(rollouts, engine.acceptance(rollouts, policy), [torch.zeros(1)])

    before = on_held_out()
    for step in range(8):
        rollouts = engine.generate(
            train[16 * step :][:16], Sampling(max_new_tokens=10, seed=step), policy, record=policy.evict is not None
        )
        metrics = distiller.step(rollouts)
        assert metrics["tokens"] == sum(map(len, rollouts))
        engine.update_sparse_adapter(distiller.adapter())
    after = on_held_out()
    assert before.mean < 0.99
    assert 1 - after.mean < 0.7 * (1 - before.mean)
    assert after.tail > before.tail


def test_choice_of_prompts_is_deterministic(model_and_rollouts):
    distiller = distiller_of(model_and_rollouts[0].model, fraction=0.25)
    picked = [distiller.is_chosen(index) for index in range(32)]
    again = distiller_of(model_and_rollouts[0].model, fraction=0.25)
    assert picked == [again.is_chosen(index) for index in range(32)]
    assert [sum(picked[i : i + 4]) for i in range(0, 32, 4)] == [1] * 8, "one of every four"
    assert len({tuple(picked[i : i + 4]) for i in range(0, 32, 4)}) > 1, "not always the same one"
    other = distiller_of(model_and_rollouts[0].model, fraction=0.25, seed=1)
    assert picked != [other.is_chosen(index) for index in range(32)]
    for fraction in (0.1, 0.3, 0.5, 0.7, 1.0):
        distiller = distiller_of(model_and_rollouts[0].model, fraction=fraction)
        assert sum(map(distiller.is_chosen, range(1000))) == pytest.approx(1000 * fraction, abs=1)


def test_rollouts_of_different_temperatures_raise(model_and_rollouts):
    loaded, rollouts = model_and_rollouts
    with pytest.raises(SettingError, match="temperature"):
        distiller_of(loaded.model).score([])
    mixed = [rollouts[0], replace(rollouts[1], sampling=replace(SAMPLING, temperature=0.5))]
    with pytest.raises(SettingError, match="temperatures"):
        distiller_of(loaded.model).score(mixed)


def test_layers_are_compiled_by_default_when_the_learner_compiles(model_and_rollouts):
    for setting, learner, expected in (
        (None, None, False),
        (None, False, False),
        (None, True, True),
        (True, False, True),
    ):
        distiller = Distiller(
            copy.deepcopy(model_and_rollouts[0].model), DistillSettings(compile=setting), compiled=learner
        )
        assert distiller.policy.compiled is expected

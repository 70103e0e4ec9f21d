"""Training the adapter: KL and acceptance by their formulas, what a step changes and what not, and that it helps."""

import copy
import io
import json
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import oracle
from alula import Engine, Evict, Sampling, Schedule, Select, Sparsity
from alula.config.load import read_tree
from alula.config.settings import DistillSettings, LearnerSettings, MoveSettings
from alula.data import PromptStream
from alula.data.load_tokenizer import attach_tokenizer
from alula.data.tasks import build
from alula.data.tasks.tokenizer import supervised_ids, task_tokenizer
from alula.distill.distiller import Acceptance, Distiller
from alula.distill.divergence import compare, compare_policies
from alula.distill.run_stage import lowest_bound, may_move, measures_at
from alula.distributed import World
from alula.errors import SettingError
from alula.learner.learner import Learner
from alula.mismatch.tail import tail
from alula.models.load import load_model
from alula.models.lora import Adapter
from alula.objective.settings import Loss
from alula.run.checkpoint import Checkpoints
from alula.trainer.trainer import Trainer
from toy import without_clocks
from two_ranks import run_on_two_ranks

PROMPTS = [list(range(5, 12)), [3, 4, 5], [9, 8] * 13, [7]]
SAMPLING = Sampling(n=2, max_new_tokens=20, temperature=0.8, ignore_eos=True)
RKV = Sparsity(Evict("rkv", 10, buffer=4, window=3, sinks=2))


@pytest.fixture(scope="module")
def made():
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


def test_chunked_and_recomputed_equals_plain_autograd():
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


# --- a step -----------------------------------------------------------------------------------------------------


def test_a_step_trains_the_adapter_and_nothing_else(made):
    loaded, rollouts = made
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


def test_the_first_policy_gradient_is_that_of_advantage_times_logprob(made):
    """ρ = 1 where φ is what sampled: d/dφ of −Σ A log q / (|o| · rollouts), and nothing is clipped."""
    loaded, rollouts = made
    advantages = torch.linspace(-1, 2, len(rollouts))
    distiller = distiller_of(loaded.model, weight=0.0, max_grad_norm=None)
    taken = {}
    distiller.optimizer.step = lambda *_: (  # type: ignore[method-assign]
        taken.update({n: m.grad.clone() for n, m in distiller.optimizer.masters.items()}),
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
            for i, own in zip(batch.index, batch.split(logprobs)):
                (-advantages[i] * own.mean() / len(rollouts)).backward(retain_graph=True)
    for name, parameter in reference.policy.adapter_parameters():
        torch.testing.assert_close(taken[name], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0])
def test_the_loss_is_the_policy_s_and_lambda_times_the_divergence(made, weight):
    loaded, rollouts = made
    metrics = distiller_of(loaded.model, weight=weight).step(rollouts, torch.linspace(-1, 2, len(rollouts)))
    assert metrics["divergence"] == metrics["kl"] > 0.01
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + weight * metrics["kl"], rel=1e-5)


def test_the_policy_loss_knows_no_reference(made):
    """Whatever the run's own KL penalty is: ρ against the recorded log-probs, nothing else."""
    loaded, rollouts = made
    advantages = torch.linspace(-1, 2, len(rollouts))
    penalised, plain = (
        distiller_of(loaded.model, policy=loss, weight=0.0).step(rollouts, advantages) for loss in (Loss(kl=0.3), None)
    )
    for name in ("policy_loss", "loss", "grad_norm"):
        assert penalised[name] == plain[name]
    assert plain["loss"] == plain["policy_loss"]


def test_the_policy_loss_raises_what_was_rewarded(made):
    loaded, rollouts = made
    advantages = torch.tensor([1.0, -1.0] * (len(rollouts) // 2))
    distiller = distiller_of(loaded.model, weight=0.0, policy=Loss(clip_low=0.9, clip_high=9.0))
    before = distiller.score(rollouts)
    for _ in range(5):
        distiller.step(rollouts, advantages)
    change = [float((b - a).mean()) for a, b in zip(before, distiller.score(rollouts))]
    assert min(change[::2]) > max(change[1::2])


def test_a_resumed_run_continues_bit_for_bit(made, tmp_path):
    loaded, rollouts = made
    advantages = torch.linspace(-1, 1, len(rollouts))
    whole, first, second = (distiller_of(loaded.model, minibatches=2) for _ in range(3))
    whole.step(rollouts, advantages)
    first.step(rollouts, advantages)
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, first.tensors(), {"distill": first.state()})
    second.resume(checkpoints.load(path, second.tensors())["distill"])
    for one in (whole, second):
        one.step(rollouts, advantages)
    for (_, a), (_, b) in zip(whole.policy.adapter_parameters(), second.policy.adapter_parameters()):
        assert torch.equal(a, b)
    assert second.state() == whole.state()


def test_a_saved_adapter_is_continued_and_served(made, tmp_path):
    loaded, rollouts = made
    trained = distiller_of(loaded.model)
    trained.step(rollouts)
    trained.adapter().save(tmp_path)
    again = Distiller(loaded.model, trained.settings, adapter=Adapter.load(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(trained.score(rollouts), again.score(rollouts)))
    engine = Engine(loaded, page=4, kv_memory="2MiB", max_rows=16, sparse_adapter=tmp_path)
    served = engine.generate(PROMPTS, SAMPLING, RKV, record=True)
    for mine, rollout in zip(again.score(served), served):
        torch.testing.assert_close(mine, rollout.logprobs, rtol=0, atol=1e-4)


def test_a_loss_that_is_not_finite_leaves_the_adapter(made):
    loaded, rollouts = made
    distiller = distiller_of(loaded.model)
    before = bits(p for _, p in distiller.policy.adapter_parameters())
    metrics = distiller.step(rollouts, torch.full((len(rollouts),), torch.nan))
    assert metrics["skipped"] == 1
    assert distiller.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before, bits(p for _, p in distiller.policy.adapter_parameters())))


@dataclass(frozen=True)
class Threads(World):
    """Ranks that are threads of one process."""

    board: list | None = None
    barrier: threading.Barrier | None = None

    def all_gather(self, value):
        self.board[self.rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    def all_sum(self, tensor):
        return tensor.copy_(torch.stack([t.to(tensor) for t in self.all_gather(tensor.clone())]).sum(0))


def test_two_ranks_train_as_one(made):
    loaded, rollouts = made
    advantages = torch.linspace(-1, 1, len(rollouts))
    alone = distiller_of(loaded.model)
    expected = alone.step(rollouts, advantages)
    shares, board, barrier = [[0, 1, 2, 3, 4], [5, 6, 7]], [None, None], threading.Barrier(2)
    ranks = [
        distiller_of(copy.deepcopy(loaded.model), world=Threads(rank, 2, board=board, barrier=barrier))
        for rank in range(2)
    ]
    found = [None, None]

    def run(rank):
        mine = shares[rank]
        found[rank] = ranks[rank].step([rollouts[i] for i in mine], advantages[mine])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    for rank in range(2):
        for name in ("loss", "kl", "policy_loss", "grad_norm", "tokens"):
            assert found[rank][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
        for (_, a), (_, b) in zip(alone.policy.adapter_parameters(), ranks[rank].policy.adapter_parameters()):
            torch.testing.assert_close(a, b, rtol=0, atol=0.05 * alone.settings.lr)


# --- does it help -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warmed_up():
    """A tiny model that has learned to continue the alphabet, and prompts to train and to test on."""
    task = build("successor", symbols=8, prefix=20, length=10)
    tokenizer = task_tokenizer(task)
    loaded = attach_tokenizer(load_model("shape:tiny-qwen3"), tokenizer, resize=True)
    pairs = [supervised_ids(tokenizer, example) for example in task.dataset(512, seed=0)]
    learner = Learner(loaded.model, LearnerSettings(lr=4e-3, activation_checkpointing=False))
    sequences = [SimpleNamespace(prompt_ids=prompt, token_ids=answer) for prompt, answer in pairs]
    for step in range(40):
        rows = sequences[(16 * step) % 512 :][:16]
        learner.update(rows, lambda logprobs, _, batch: (-logprobs.mean(), {}))
    held_out = [supervised_ids(tokenizer, example)[0] for example in task.dataset(24, seed=1)]
    return loaded, [prompt for prompt, _ in pairs[:128]], held_out


@pytest.mark.parametrize(
    "policy",
    [
        Sparsity(Evict("snapkv", 10, buffer=4, window=4, sinks=2)),
        Sparsity(select=Select("block-topk", 8, block=2, dense_layers=0)),
    ],
    ids=["snapkv", "block-topk"],
)
def test_distillation_raises_acceptance_on_held_out_prompts(policy, warmed_up):
    loaded, train, held_out = warmed_up
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


# --- settings, choices, moving on -------------------------------------------------------------------------------


def test_a_fraction_of_the_prompts_is_chosen_and_always_the_same(made):
    distiller = distiller_of(made[0].model, fraction=0.25)
    picked = distiller.choose_prompts(32, 7)
    assert sum(picked) == 8
    assert picked == distiller_of(made[0].model, fraction=0.25).choose_prompts(32, 7)
    assert picked != distiller.choose_prompts(32, 8)
    assert distiller.choose_prompts(1, 0) == [True]


def test_settings_are_refused_in_words(made):
    for settings, words in (
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0}, "alpha=0"),
        ({"fraction": 0.0}, r"fraction=0\.0"),
        ({"weight": -1}, "weight=-1"),
        ({"targets": ()}, "targets"),
        ({"max_grad_norm": 0}, "max_grad_norm=0"),
        ({"loss": "both"}, "unknown setting of DistillSettings: 'loss'"),
        ({"first": {"minibatches": 5, "prompts": 4}}, r"first\.minibatches=5: a batch has only 4 rollouts"),
        ({"move": {"sparsity": "rkv:64", "tau": 1.5}}, r"move\.tau=1\.5"),
    ):
        with pytest.raises(SettingError, match=words):
            DistillSettings(**settings)
    loaded, rollouts = made
    with pytest.raises(SettingError, match="temperature"):
        distiller_of(loaded.model).score([])
    mixed = [rollouts[0], replace(rollouts[1], sampling=replace(SAMPLING, temperature=0.5))]
    with pytest.raises(SettingError, match="temperatures"):
        distiller_of(loaded.model).score(mixed)


def test_when_a_run_moves_to_the_sparser_policy():
    positions, prompts = np.tile(np.arange(100), 30), np.repeat(np.arange(30), 100)
    good = tail(np.full(3000, 0.9), positions, prompts, width=50)
    late = tail(np.where(positions < 50, 0.9, 0.7), positions, prompts, width=50)
    few = tail(np.full(500, 0.9), positions[:500], prompts[:500], width=50)
    assert lowest_bound(good) == pytest.approx(0.9)
    assert lowest_bound(late) == pytest.approx(0.7), "every bin counts"
    assert lowest_bound(few) == -np.inf, "five prompts prove nothing"
    unlike = tail(np.where(prompts < 28, 0.9, 0.5), positions, prompts, quantile=0.07, width=50)
    assert unlike.value.min() > 0.86 > unlike.lower.max(), "two prompts of thirty: the tail may as well be theirs"
    assert lowest_bound(unlike) < 0.86
    waits, planned = MoveSettings(sparsity="rkv:64", every=5), MoveSettings(sparsity="rkv:64", at=12)
    assert [step for step in range(1, 16) if measures_at(waits, step)] == [5, 10, 15]
    assert (may_move(waits, 5, good), may_move(waits, 5, late)) == (True, False)
    assert [step for step in range(1, 16) if measures_at(planned, step)] == [12]
    assert may_move(planned, 12, late)


RECIPE = {
    "steps": 4,
    "model": {"source": "shape:tiny-llama"},
    "data": {"source": "task:copy-last", "size": 96, "options": {"symbols": 8, "prefix": 12}},
    "rewards": {"use": ["task:copy-last"], "workers": 1},
    "sparsity": {"evict": {"method": "rkv", "budget": 10, "buffer": 2, "window": 2, "sinks": 1}},
    "sampling": {"prompts": 6, "n": 4, "max_new_tokens": 8},
    "learner": {"lr": 3e-3, "token_budget": 4096, "activation_checkpointing": False},
    "distill": {
        "rank": 4,
        "lr": 3e-3,
        "fraction": 0.5,
        "every": 2,
        "activation_checkpointing": False,
        "move": {"sparsity": "rkv:8+2,window=2,sinks=1", "tau": 0.01, "every": 2, "prompts": 24},
    },
    "engine": {"kv_memory": "4MiB"},
    "eval": {"every": 4, "size": 24, "sparse": True},
    "checkpoint": {"every": 3, "best": False},
}


def trained(out, stop_after=None, resume=False, **changes):
    config = read_tree(RECIPE | {"out": str(out)} | changes)
    trainer = Trainer(config, resume=resume, stream=io.StringIO())
    if stop_after is not None:
        step = trainer.train_step

        def train_step():
            if trainer.step == stop_after:
                raise KeyboardInterrupt
            step()

        trainer.train_step = train_step
    if stop_after is None:
        trainer.run()
    else:
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    return [without_clocks(json.loads(line)) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_distils_moves_on_and_survives_a_kill(tmp_path):
    whole = trained(tmp_path / "whole")
    assert [("distill/kl" in row, "distill/candidate_tail" in row) for row in whole] == [
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    ]
    assert [row["schedule/budget/0"] for row in whole] == [10, 10, 8, 8], "sparser after the second step"
    assert whole[1]["distill/tokens"] <= 3 * 4 * 8
    adapter = Adapter.load(tmp_path / "whole" / "sparse_adapter")
    assert any(b.abs().max() > 0 for _, b in adapter.weights.values())
    events = [json.loads(line) for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "sparser" and "moves to it" in event["message"] for event in events)

    clocks = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["speed/distill_cost"] > 0 for row in clocks)
    assert ["speed/sparser" in row for row in clocks] == [False, False, True, True]
    seconds = [row["time/rollout"] for row in clocks]
    tokens = [row["speed/tokens_per_s"] * spent for row, spent in zip(clocks, seconds)]
    before = sum(tokens[:2]) / sum(seconds[:2])
    assert clocks[3]["speed/sparser"] == pytest.approx(clocks[3]["speed/tokens_per_s"] / before)

    trained(tmp_path / "killed", stop_after=3)
    assert trained(tmp_path / "killed", resume=True) == whole
    again = Adapter.load(tmp_path / "killed" / "sparse_adapter")
    assert all(torch.equal(b, again.weights[name][1]) for name, (_, b) in adapter.weights.items())


def watched(out, **changes):
    """A run of which every call of the distiller is seen: (rollouts, advantages, θ then, φ before), and the trainer."""
    trainer = Trainer(read_tree(RECIPE | {"out": str(out)} | changes), stream=io.StringIO())
    distiller, seen = trainer.distill.distiller, []
    step = distiller.step

    def distil(rollouts, advantages):
        theta = {name: value.detach().clone() for name, value in trainer.learner.full_parameters()}
        base = dict(distiller.policy.teacher.named_parameters())
        assert all(torch.equal(base[name], value) for name, value in theta.items()), "the teacher is θ after its update"
        seen.append(SimpleNamespace(rollouts=rollouts, advantages=advantages, theta=theta))
        return step(rollouts, advantages)

    distiller.step = distil
    return trainer, seen


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}], ids=["shared weights", "lora"])
def test_a_run_distils_every_chosen_rollout_and_its_engine_samples_with_what_was_learned(tmp_path, lora):
    """All rollouts are vetoed, so θ learns nothing of them, and φ learns from them all the same."""
    trainer, seen = watched(
        tmp_path,
        steps=3,
        eval={"every": 0},
        learner=RECIPE["learner"] | {"lora": lora},
        objective={"loss": "dr_grpo", "clip_high": 0.28, "kl": 0.1, "correction": {"preset": "sparse-rl", "veto": 1e6}},
        distill=RECIPE["distill"] | {"move": None, "every": 1, "fraction": 1.0},
    )
    experiences, update = [], trainer.updater.update
    trainer.updater.update = lambda batch, *rest: experiences.append(batch) or update(batch, *rest)
    trainer.run()
    assert len(seen) == 3
    assert trainer.distill.distiller.loss == replace(trainer.config.objective, kl=0.0)
    assert (trainer.config.objective.clip_high, trainer.config.objective.kl) == (0.28, 0.1)
    for call, batch in zip(seen, experiences):
        assert call.rollouts == batch.rollouts
        rewards = torch.tensor(batch.rewards).view(-1, 4)
        above = (rewards - rewards.mean(1, keepdim=True)).flatten()
        torch.testing.assert_close(call.advantages.cpu().sign(), above.sign())
    assert any(call.advantages.abs().max() > 0 for call in seen)
    adapter = trainer.distill.distiller.adapter()
    plain, sparse = (dict(m.named_parameters()) for m in (trainer.engine.model, trainer.engine.sparse_model))
    moved = 0
    for name, (a, b) in adapter.weights.items():
        update = adapter.scale * b @ a
        moved += update.abs().max() > 1e-4
        torch.testing.assert_close(sparse[f"{name}.weight"], plain[f"{name}.weight"] + update, rtol=1e-4, atol=1e-5)
    assert moved > 0
    assert adapter.base_model == "shape:tiny-llama"


def test_the_teacher_follows_theta(tmp_path):
    trainer, seen = watched(
        tmp_path, steps=3, eval={"every": 0}, distill=RECIPE["distill"] | {"move": None, "every": 1}
    )
    trainer.run()
    first, last = seen[0].theta, seen[-1].theta
    assert any(not torch.equal(first[name], value) for name, value in last.items()), "or this test shows nothing"


def test_the_candidate_is_measured_itself_on_held_out_prompts(tmp_path):
    trainer, _ = watched(tmp_path)
    calls, generate, try_move, messages = [], trainer.collector.generate, trainer.distill.try_move, []

    def spied(prompts, sampling, sparsity, **options):
        calls.append((prompts, sparsity))
        return generate(prompts, sampling, sparsity, **options)

    def measured(step, rollouts):
        messages.append(try_move(step, rollouts))
        return messages[-1]

    trainer.collector.generate, trainer.distill.try_move, trainer.step = spied, measured, 2
    with trainer.logger:
        trainer.try_move(trainer.distill)
    [(prompts, sparsity)], [text] = calls, messages
    assert sparsity.evict.budget == 8
    assert prompts == [list(example.prompt_ids) for example in trainer.held_out][:24]
    assert "rkv:8+2" in text


def test_a_run_begins_with_a_distilled_adapter(tmp_path):
    trainer, _ = watched(tmp_path / "first", steps=2, eval={"every": 0})
    trainer.run()
    saved = Adapter.load(tmp_path / "first" / "sparse_adapter")
    begun, seen = watched(
        tmp_path / "second",
        steps=2,
        eval={"every": 0},
        distill=RECIPE["distill"] | {"adapter": str(tmp_path / "first" / "sparse_adapter"), "rank": 16, "move": None},
    )
    now = begun.distill.distiller.adapter()
    assert now.rank == saved.rank == 4
    assert all(torch.equal(b, now.weights[name][1]) for name, (_, b) in saved.weights.items())
    begun.run()
    assert seen
    with pytest.raises(SettingError, match=r"there is no adapter_config\.json"):
        watched(tmp_path / "third", distill={"adapter": str(tmp_path)})


FIRST = {"steps": 3, "prompts": 5, "minibatches": 2}


def beginning(out, first, **options):
    """A run of two steps that distils all of its rollouts, and perhaps before the first."""
    distill = RECIPE["distill"] | {"move": None, "every": 1, "fraction": 1.0, "first": first}
    config = read_tree(RECIPE | {"out": str(out), "steps": 2, "eval": {"every": 2, "size": 8}, "distill": distill})
    return Trainer(config, stream=io.StringIO(), **options)


def test_phi_alone_is_trained_before_the_first_step(tmp_path):
    plain, run = beginning(tmp_path / "plain", None), beginning(tmp_path / "run", FIRST)
    prompts = {trainer: [] for trainer in (plain, run)}
    for trainer, seen in prompts.items():
        update = trainer.updater.update

        def updated(batch, *rest, seen=seen, update=update):
            seen.append([rollout.prompt_ids for rollout in batch.rollouts])
            return update(batch, *rest)

        trainer.updater.update = updated
    start = {name: value.detach().clone() for name, value in run.learner.full_parameters()}
    distiller, calls = run.distill.distiller, []
    step, train_step = distiller.step, run.train_step

    def distil(rollouts, advantages=None, minibatches=None):
        still = all(torch.equal(start[name], value) for name, value in run.learner.full_parameters())
        calls.append((len(rollouts), advantages is not None, distiller.steps, still))
        return step(rollouts, advantages, minibatches)

    def first_train_step():
        weights = [dict(model.named_parameters()) for model in (run.engine.model, run.engine.sparse_model)]
        assert any(not torch.equal(weights[0][f"{n}.weight"], weights[1][f"{n}.weight"]) for n in adapted), "merged"
        run.train_step = train_step
        train_step()

    adapted = list(distiller.adapter().weights)
    distiller.step, run.train_step = distil, first_train_step
    plain.run()
    run.run()
    assert calls[:3] == [(5, False, 0, True), (5, False, 2, True), (5, False, 4, True)]
    assert [rewarded for _, rewarded, *_ in calls[3:]] == [True, True], "rewards count from the first step on"
    assert prompts[run] == prompts[plain], "the run's own prompts are those of a run without it"
    first = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert (first["step"], first["kind"]) == (0, "distilled-first")
    assert "was trained on 3 batches before the first step: divergence of the first 0." in first["message"]
    assert (tmp_path / "run" / "checkpoints" / "step-00000000").exists(), "a crash from here on repeats none of it"


@pytest.mark.parametrize(
    "changes",
    [
        {"sparsity": {"select": {"method": "block-topk", "budget": 6, "block": 2, "dense_layers": 1}}},
        {"learner": {"lora": {"rank": 4, "alpha": 8.0}}},
        {"control": {"enabled": True, "vetoed": 0.05, "on_violation": "adapt"}},
    ],
    ids=["selector", "lora", "control"],
)
def test_before_the_first_step_in_every_kind_of_run(tmp_path, changes):
    tree = RECIPE | {"out": str(tmp_path / "run"), "steps": 1, "eval": {"every": 0}}
    changes = {"distill": {"move": None, "first": FIRST}} | changes
    changes["distill"] = {"move": None, "first": FIRST} | changes["distill"]
    tree |= {name: (RECIPE.get(name, {}) if name != "sparsity" else {}) | part for name, part in changes.items()}
    trainer = Trainer(read_tree(tree), stream=io.StringIO())
    asked, generate = [], trainer.collector.generate

    def spied(prompts, sampling, sparsity, **options):
        asked.append((prompts, sampling.seed, sparsity, options))
        return generate(prompts, sampling, sparsity, **options)

    trainer.collector.generate = spied
    trainer.run()
    first = asked[:3]
    assert len({str(prompts) for prompts, *_ in first}) == len({seed for _, seed, *_ in first}) == 3
    assert all(sparsity == asked[3][2] for _, _, sparsity, _ in first), "the policy that the run begins with"
    assert all(options == {"record": sparsity.evict is not None} for _, _, sparsity, options in first)
    own = [list(example.prompt_ids) for example in PromptStream(trainer.stream.dataset, trainer.config.seed).next(15)]
    assert [p for prompts, *_ in first for p in prompts] != own, "another order than the run's"
    assert len(trainer.distill.divergences) == 3
    assert any(b.abs().max() > 0 for _, b in trainer.distill.distiller.adapter().weights.values())


def test_a_stop_before_the_first_step_loses_nothing(tmp_path):
    whole, stopped = beginning(tmp_path / "whole", FIRST), beginning(tmp_path / "stopped", FIRST)
    assert whole.run()

    def stop_after_a_batch(trainer):
        first_step = trainer.distill.first_step

        def and_stop(*arguments):
            first_step(*arguments)
            trainer.stop.requested = True

        trainer.distill.first_step = and_stop
        assert not trainer.run()

    stop_after_a_batch(stopped)
    again = beginning(tmp_path / "stopped", FIRST, resume=True)
    assert len(again.distill.divergences) == 1
    stop_after_a_batch(again)
    resumed = beginning(tmp_path / "stopped", FIRST, resume=True)
    assert len(resumed.distill.divergences) == 2, "a second stop keeps what came after the first"
    for _ in range(2):  # killed at the first step: the last checkpoint is from before the first evaluation
        resumed.train_step = exit
        with pytest.raises(SystemExit):
            resumed.run()
        resumed = beginning(tmp_path / "stopped", FIRST, resume=True)
        assert len(resumed.distill.divergences) == 3
    assert resumed.run()
    for file in ("metrics.jsonl", "evals.jsonl", "events.jsonl"):
        one, other = (
            [without_clocks(json.loads(line)) for line in (tmp_path / name / file).read_text().splitlines()]
            for name in ("whole", "stopped")
        )
        assert len(one) == (1 if file == "events.jsonl" else 2)
        assert one == other
    late = beginning(tmp_path / "stopped", FIRST | {"steps": 5}, resume=True)
    assert late.run()
    assert "the run has begun, so nothing is distilled before its first step" in late.logger.stream.getvalue()
    one, other = (Adapter.load(tmp_path / name / "sparse_adapter").weights for name in ("whole", "stopped"))
    assert all(torch.equal(b, other[name][1]) for name, (_, b) in one.items())


FIRST_ON_A_RANK = """
import json, sys
from pathlib import Path

import torch
from test_distill import FIRST, beginning

out = Path(sys.argv[1])
run = beginning(out / "run", FIRST)
distiller, learner, world, shares, still = run.distill.distiller, run.learner, run.world, [], []
def theta():
    return {name: value.detach().clone() for name, value in learner.full_parameters()}
def phi():
    return {f"{name}.{i}": part for name, pair in distiller.adapter().weights.items() for i, part in enumerate(pair)}
def same_everywhere(tensors):
    one, other = world.all_gather(tensors)
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())

begun, step = theta(), distiller.step
def watched(rollouts, advantages=None, minibatches=None):
    if advantages is None:  # before the first step
        shares.append([rollout.prompt_ids for rollout in rollouts])
        now = theta()
        still.append(all(torch.equal(value, now[name]) for name, value in begun.items()))
    return step(rollouts, advantages, minibatches)
distiller.step = watched

checks, first = {}, run.distill_first
def distill_first(stage):
    first(stage)
    checks["phi after first"] = same_everywhere(phi())
    checks["sparse policy after first"] = same_everywhere(dict(run.engine.sparse_model.named_parameters()))
    checks["phi was trained"] = any(value.any() for name, value in phi().items() if name.endswith(".1"))
run.distill_first = distill_first
assert run.run()
checks["theta stood still"] = all(world.all_gather(all(still)))
checks["theta"], checks["phi"] = same_everywhere(theta()), same_everywhere(phi())
checks["theta was trained"] = any(not torch.equal(value, begun[name]) for name, value in theta().items())
for which in ("model", "sparse_model"):
    checks[f"engine's {which}"] = same_everywhere(dict(getattr(run.engine, which).named_parameters()))
report = {"checks": checks, "shares": world.all_gather(shares)}
report["divergences"] = world.all_gather(run.distill.divergences)
if world.rank == 0:
    (out / "report.json").write_text(json.dumps(report))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_before_the_first_step_on_two_ranks(tmp_path):
    """Both train φ on their shares of each batch, and hold the same φ and θ afterwards."""
    script = tmp_path / "worker.py"
    script.write_text(FIRST_ON_A_RANK)
    run_on_two_ranks(script, tmp_path, timeout=180)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [name for name, holds in report["checks"].items() if not holds] == []
    assert [[len(share) for share in shares] for shares in report["shares"]] == [[3, 3, 3], [2, 2, 2]]
    alone = beginning(tmp_path / "alone", FIRST)
    prompts = PromptStream(alone.stream.dataset, ~alone.config.seed).next(15)
    for batch, (one, other) in enumerate(zip(*report["shares"])):
        whole = [list(example.prompt_ids) for example in prompts[5 * batch : 5 * batch + 5]]
        assert (one, other) == (whole[::2], whole[1::2])
    one, other = report["divergences"]
    assert one == other
    assert len(one) == 3
    event = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert (event["step"], event["kind"]) == (0, "distilled-first")


def test_a_run_with_a_selector_and_lora(tmp_path):
    """The learner's LoRA is θ's own: φ reads the engine's copy of the merged weights."""
    select = {"method": "block-topk", "budget": 6, "block": 2, "dense_layers": 1}
    distill = RECIPE["distill"] | {"move": None}
    rows = trained(
        tmp_path / "run",
        steps=2,
        sparsity={"select": select},
        distill=distill,
        learner=RECIPE["learner"] | {"lora": {"rank": 4, "alpha": 8.0}},
        eval={"every": 0},
    )
    assert ["distill/divergence" in row for row in rows] == [False, True], "every second step"
    assert rows[1]["distill/divergence"] >= 0
    assert rows[1]["distill/drift"] < 0.5
    assert rows[1]["distill/tokens"] <= 3 * 4 * 8


def test_a_step_whose_rollouts_were_all_continued_densely_distils_nothing(tmp_path):
    everything = {"preset": "reroll", "veto": 1e6}
    rows = trained(
        tmp_path / "run",
        steps=2,
        objective={"correction": everything},
        eval={"every": 0},
        distill=RECIPE["distill"] | {"move": None, "every": 1},
    )
    assert [row["mismatch/rerolled"] for row in rows] == [1, 1]
    assert not any("distill/kl" in row for row in rows)


def test_recipes_that_cannot_work_are_refused():
    for changes, words in (
        ({"sparsity": {}}, "the rollouts are dense"),
        ({"sparsity": RECIPE["sparsity"] | {"select": {"method": "quest", "budget": 64}}}, "cannot be replayed"),
        ({"distill": {"first": {"steps": 0}}}, r"distill\.first\.steps=0"),
        ({"distill": {"first": {"prompts": 3}}}, r"distill\.first\.minibatches=4: a batch has only 3 rollouts"),
        ({"distill": {"first": {}, "weight": 0.0}}, r"distill\.first .*distill\.weight=0"),
        (
            {"distill": {"move": {"sparsity": "snapkv:8+2,window=2,sinks=1", "prompts": 19}}},
            r"distill\.move\.prompts=19: .* at least 20",
        ),
        ({"distill": {"move": {"sparsity": "rkv:8", "tau": 2.0}}}, "tau"),
        ({"distill": {"move": {"sparsity": "dense"}}}, "name one with a smaller budget"),
        ({"distill": {"move": {"sparsity": "rkv:10+2,window=2,sinks=1"}}}, "budget of 10"),
        ({"distill": {"move": {"sparsity": "rkv:8+2,window=2,sinks=1 & quest:64"}}}, "cannot be replayed"),
        ({"distill": {"move": {"sparsity": "rkv:8+2,window=2,sinks=1", "at": 9}}}, "the run ends after steps=4"),
        ({"control": {"enabled": True, "tau": 0.8}}, "both choose the budgets"),
        ({"distill": {"rnk": 4}}, "distill.rank"),
    ):
        with pytest.raises(SettingError, match=words):
            read_tree(RECIPE | {"out": "nowhere"} | changes)


def test_the_command_writes_an_adapter_and_a_table(warmed_up, tmp_path, capsys):
    from alula.cli.main import app

    loaded, train, _ = warmed_up
    folder, out = tmp_path / "model", tmp_path / "distilled"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    words = loaded.tokenizer.batch_decode([prompt[1:] for prompt in train[:60]])
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    arguments = [
        str(folder),
        "--data",
        str(data),
        "--sparsity",
        "snapkv:10+4,window=4,sinks=2",
        "--steps",
        "3",
        "--prompts",
        "12",
        "--samples",
        "1",
        "--held-out",
        "20",
        "--max-new-tokens",
        "10",
        "--rank",
        "4",
        "--lr",
        "4e-3",
        "--page",
        "4",
        "--kv-memory",
        "4MiB",
        "--out",
        str(out),
    ]
    with pytest.raises(SystemExit) as finished:
        app(["distill", *arguments])
    assert finished.value.code == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["distill/kl"] > 0 and 0 < row["distill/acceptance_tail"] <= 1 for row in rows)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["after"]["acceptance_mean"] > summary["before"]["acceptance_mean"]
    shown = capsys.readouterr().out
    assert f"{summary['after']['acceptance_tail']:.4f}" in shown
    adapter = Adapter.load(out / "adapter")
    assert adapter.rank == 4
    assert any(b.abs().max() > 0 for _, b in adapter.weights.values())

    def again(*changes: str) -> int:
        with pytest.raises(SystemExit) as ended:
            app(["distill", *arguments[:-1], str(tmp_path / "parts"), "--save-every", "2", *changes])
        return ended.value.code

    assert again("--steps", "2") == 0
    assert again("--steps", "3") == 2
    assert "continue it with --resume" in capsys.readouterr().err
    assert again("--resume", "--lr", "1e-3", "--prompts", "10") == 2
    assert "prompts=12, not prompts=10" in capsys.readouterr().err
    for changes, words in (
        (["--rank", "8"], "rank=4, not rank=8"),
        (["--alpha", "64"], "alpha=8.0, not alpha=64.0"),
        (["--targets", "q_proj"], "targets=all, not targets=q_proj"),
        (["--prompt", "{prompt}!"], "prompt=None, not prompt={prompt}!"),
        (["--no-chat"], "chat=None, not chat=False"),
        (["--residual", "float32"], "residual=None, not residual=float32"),
        (["--steps", "1"], "steps=1: "),
        (["--steps", "0"], "steps=0: must be at least 1"),
        (["--bin", "0"], "bin=0: must be at least 1"),
    ):
        assert again("--resume", *changes) == 2
        assert words in capsys.readouterr().err
    assert again("--resume") == 0
    resumed = Adapter.load(tmp_path / "parts" / "adapter")
    assert all(torch.equal(b, resumed.weights[name][1]) for name, (_, b) in adapter.weights.items())
    assert json.loads((tmp_path / "parts" / "summary.json").read_text()) == summary


SMALL = [
    "distill",
    "shape:tiny-llama",
    "--data",
    "task:successor",
    "--options",
    "{symbols: 4, prefix: 2, length: 2}",
    "--steps",
    "2",
    "--prompts",
    "8",
    "--held-out",
    "16",
    "--max-new-tokens",
    "6",
    "--save-every",
    "1",
]


def test_an_interrupted_command_says_so(tmp_path, monkeypatch):
    from alula.cli.main import app

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("alula.distill.standalone.distill_prompts", interrupted)
    with pytest.raises(SystemExit):
        app([*SMALL, "--sparsity", "snapkv:3+1,window=1,sinks=1", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "stopped"


def test_another_schedule_of_the_same_name_is_no_resume(tmp_path, capsys):
    from alula.cli.main import app

    schedule, out = tmp_path / "schedule.json", str(tmp_path / "out")

    def run(*more: str) -> int:
        with pytest.raises(SystemExit) as ended:
            app([*SMALL, "--sparsity", f"block-topk:{schedule},block=2", "--out", out, *more])
        return ended.value.code

    Schedule((6,), block=2).save(schedule)
    assert run() == 0
    assert run("--resume") == 0
    Schedule((8,), block=2).save(schedule)
    assert run("--resume") == 2
    said = capsys.readouterr().err
    assert "schedules=[[[6], 2000]], not schedules=[[[8], 2000]]" in said


def test_layers_are_compiled_where_the_learner_compiles_its_own(made):
    for own, learner, expected in ((None, None, False), (None, False, False), (None, True, True), (True, False, True)):
        distiller = Distiller(copy.deepcopy(made[0].model), DistillSettings(compile=own), compiled=learner)
        assert distiller.policy.compiled is expected

"""Training over several turns: masks inside a sequence, failures, rerolls, and runs that do not depend on the tools."""

import copy
import math
import random
import time

import pytest
import torch

import toy
from alula.config.load import load_config
from alula.environments.episodes import Episode
from alula.environments.lookup import Lookup
from alula.errors import RunFailed, SettingError
from alula.trainer.step_metrics import Clock

RECIPE = toy.RECIPE.with_name("turns-toy.yaml")
QUICK = ("steps=3", "sampling.prompts=4", "sampling.n=4", "eval.every=0", "checkpoint.every=0")


def config(out, *settings):
    return load_config(RECIPE, [f"out={out}", *QUICK, *settings])


def collected(out, *settings):
    """A run after its first step, and the scored rollouts of the second."""
    run = toy.trainer(config(out, *settings))
    run.train_step()
    clock = Clock(run.world.device)
    batch = run.collector.collect(2, clock)
    run.updater.score(batch)
    run.collector.grade(batch, clock)
    return run, batch


def plain(model):
    """The same weights with transformers' own attention."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    twin = type(model)(config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def logprobs_of(model, episode, temperature):
    """Log-probs of every token after the prompt, given ones too, by transformers alone."""
    ids = torch.tensor([episode.prompt_ids + episode.token_ids])
    logits = model(ids, use_cache=False).logits[0, len(episode.prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(episode.prompt_ids) :, None])[:, 0]


@pytest.mark.parametrize("correction", ["sparse-rl", "tis", "geometric", "strict"])
def test_the_loss_equals_an_independent_computation_with_masks(tmp_path, correction):
    """GRPO with a KL over padded rows: a mask of the sampled tokens is the only difference to single turns."""
    run, batch = collected(tmp_path, f"objective.correction={correction}", "learner.updates=1", "sampling.n=8")
    episodes, c, kl = batch.rollouts, run.config.objective.correction, run.config.objective.kl
    assert any((~e.sampled).any() for e in episodes), "there are given tokens inside sequences"
    model, reference = (plain(m) for m in (run.loaded.model, run.learner.reference.model))
    temperature = run.config.sampling.temperature

    masks = [e.sampled.float() for e in episodes]
    new = [logprobs_of(model, e, temperature) for e in episodes]
    initial = [logprobs_of(reference, e, temperature).detach() for e in episodes]
    weights = []
    for episode, mask, dense in zip(episodes, masks, new):
        log_xi = torch.where(mask > 0, dense.detach() - episode.logprobs, 0.0)
        if c.weight == "token":
            weight = log_xi.exp()
        elif c.weight == "none":
            weight = torch.ones_like(log_xi)
        else:
            weight = ((log_xi * mask).sum() / mask.sum()).exp().expand_as(log_xi)
        weight = weight if c.cap is None else weight.clamp(max=c.cap)
        if c.mask == "geometric":
            mean = ((log_xi * mask).sum() / mask.sum()).exp()
            weight = weight * float((c.mask_low or 0) <= mean <= (c.mask_high or math.inf))
        if c.veto is not None and ((log_xi < math.log(c.veto)) & (mask > 0)).any():
            weight = weight * 0
        weights.append(weight * mask)
    rewards = torch.tensor(batch.rewards, dtype=torch.float64).view(-1, batch.n)
    spread = rewards.std(1, keepdim=True)
    advantages = torch.where(spread > 0, (rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-6), 0.0).view(-1)
    assert advantages.abs().sum() > 0
    loss = 0.0
    for weight, mask, a, now, then in zip(weights, masks, advantages.tolist(), new, initial):
        ratio = (now - now.detach()).exp()
        distance = (now - then) * mask
        k3 = (torch.exp(-distance) - 1 + distance) * mask
        loss = loss + (-(weight * ratio * a).sum() + kl * k3.sum()) / mask.sum() / len(episodes)
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()

    minibatch = run.updater.assign_minibatches(batch)
    corrected = run.updater.correct(batch, minibatch)
    mine = run.updater.advantages(batch, corrected)
    torch.testing.assert_close(mine.double(), advantages, atol=1e-5, rtol=1e-5)
    [update] = run.updater.update(batch, minibatch, corrected, mine).updates
    assert update.loss == pytest.approx(float(loss.detach()), abs=2e-6)
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-4)


def test_given_tokens_are_in_no_length_ratio_or_share(tmp_path):
    run, batch = collected(tmp_path)
    sampled = [int(e.sampled.sum()) for e in batch.rollouts]
    assert batch.lengths == sampled != [len(e) for e in batch.rollouts]
    assert [len(x) for x in batch.dense] == sampled
    assert all(x.isfinite().all() for x in (*batch.dense, *batch.sampled(run.world.device)))
    run.train_step()
    row = toy.rows(tmp_path, "metrics.jsonl")[-1]
    assert row["environment/turns"] > 1
    assert row["environment/given_tokens"] > 0
    assert row["environment/failed"] == 0
    assert row["time/environment_mean"] > 0
    assert row["response/length_mean"] <= run.config.most_sampled()
    assert math.isfinite(row["policy/loss"])
    assert math.isfinite(row["mismatch/alpha_p05"])
    assert 0 < row["kv/saved"] < 1
    assert all(word in toy.printed(run) for word in ("turns", "tool failures", "waiting for tools", "given tokens"))


class Slow(Lookup):
    """Its answers take a random time."""

    def step(self, completion):
        time.sleep(random.random() * 0.01)
        return super().step(completion)


def numbers(out):
    return [toy.without_clocks(row) for row in toy.rows(out, "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", ["dense", "snapkv:6+2,window=2,sinks=1"])
def test_two_runs_are_bit_equal_whatever_the_tools_take(tmp_path, sparsity):
    settings = (f"sparsity={sparsity}", "engine.buckets=[16]")
    for name, use in (("quick", "lookup"), ("slow", "test_turns:Slow")):
        run = toy.trainer(config(tmp_path / name, f"environment.use={use}", *settings))
        for _ in range(3):
            run.train_step()
    assert numbers(tmp_path / "quick") == numbers(tmp_path / "slow")


class Unreliable(Lookup):
    """Its first episode of every group fails."""

    seen: dict = {}  # noqa: RUF012

    def reset(self, example, seed):
        count = self.seen[seed] = self.seen.get(seed, 0) + 1
        if count == 1:
            raise OSError("no database")
        return super().reset(example, seed)


def test_failures_are_counted_and_left_out_of_baseline_and_loss(tmp_path):
    run, batch = collected(tmp_path, "environment.use=test_turns:Unreliable", "learner.updates=1")
    failed = [e.failure is not None for e in batch.rollouts]
    assert sum(failed) == 4
    advantages = run.updater.advantages(batch, run.updater.correct(batch, run.updater.assign_minibatches(batch)))
    assert all(a == 0 for a, f in zip(advantages.tolist(), failed) if f)
    for group in range(4):
        rest = [a for a, f in zip(advantages.tolist(), failed) if not f][group * 3 : group * 3 + 3]
        assert sum(rest) == pytest.approx(0, abs=1e-5), "the mean is that of the episodes that worked"
    silent = sum(not part.any() for part in advantages.split(batch.n))
    row = toy.rows(tmp_path, "metrics.jsonl")[0]
    assert row["groups/no_signal"] == silent / 4, "a failed episode's reward is no signal"
    assert row["environment/failed"] == 0.25
    assert "no database" in toy.printed(run)


class Broken(Lookup):
    def step(self, completion):
        raise OSError("no database")


def test_an_environment_that_always_fails_ends_the_run(tmp_path):
    run = toy.trainer(config(tmp_path, "environment.use=test_turns:Broken"))
    with pytest.raises(RunFailed, match=r"every one of the run's first 16 episodes.*no database"):
        run.train_step()


def test_reroll_replays_the_environment(tmp_path, monkeypatch):
    """With a veto that most ratios fail, rerolled episodes are dense from their first vetoed token on."""
    settings = ("objective.correction=reroll", "objective.correction.veto=0.999")
    run = toy.trainer(config(tmp_path, *settings))
    before = []
    monkeypatch.setattr(run.collector, "_begin_grading", lambda batch: before.append(batch) or begin(batch))
    begin = type(run.collector)._begin_grading.__get__(run.collector)
    run.train_step()
    [batch] = before
    assert any(batch.rerolled)
    assert any(rerolled and len(e.turns) > 1 for rerolled, e in zip(batch.rerolled, batch.rollouts))
    for episode, dense in zip(batch.rollouts, batch.dense):
        assert isinstance(episode, Episode)
        assert episode.failure is None
        assert sum(span.tokens for span in episode.spans) == len(episode) == len(episode.logprobs)
        assert len(dense) == episode.sampled_tokens
        assert episode.logprobs[episode.sampled].isfinite().all()
        assert (dense - episode.logprobs[episode.sampled]).exp().min() > 0.99, "nothing is left to veto"
        assert episode.turns[-1].completion == episode.text
        for turn in episode.turns:
            assert turn.start == 0 or not episode.sampled[turn.start - 1]
            assert episode.sampled[turn.start]


class Unrepeatable(Lookup):
    replayable = False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["environment.use=test_turns:Unrepeatable", "objective.correction=reroll"], "replayable"),
        (["distill={}"], "distill with an environment"),
        (["environment=null"], "has no environment"),
        (["environment.max_turns=0"], "max_turns"),
    ],
)
def test_combinations_that_are_rejected(tmp_path, settings, message):
    with pytest.raises(SettingError, match=message):
        config(tmp_path, *settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["environment.max_tokens=5000"], "max_position_embeddings.*environment.max_tokens=5000"),
        (["environment.max_tokens=2000", "engine.kv_memory=1MiB"], "kv_memory.*environment.max_tokens=2000"),
    ],
)
def test_pre_flight_reads_the_tokens_of_an_episode(tmp_path, settings, message):
    with pytest.raises(SettingError, match=message):
        toy.trainer(config(tmp_path, "sparsity=dense", *settings))


def test_the_check_tries_the_environment_and_names_templates(tmp_path):
    from alula.trainer.check_environment import check_environment

    settings = config(tmp_path)
    run = toy.trainer(settings)
    training, tokenizer = run.stream.dataset, run.loaded.tokenizer
    assert dict(check_environment(settings, training, tokenizer)) == {
        "environment": "lookup: at most 3 turns and 32 tokens per episode, 60 s per call"
    }
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %} {{ m.content }} {% endfor %} :"
    assert "rewrites earlier turns" in dict(check_environment(settings, training, tokenizer))["chat template"]
    tokenizer.chat_template = None
    with pytest.raises(SettingError, match=r"environment.max_tokens=2: the first prompt alone has 3"):
        list(check_environment(config(tmp_path, "environment.max_tokens=2"), training, tokenizer))
    with pytest.raises(SettingError, match=r"cannot be reset on the first example \(OSError: no database .*line"):
        list(check_environment(config(tmp_path, "environment.use=test_turns:NoReset"), training, tokenizer))
    assert NoReset.closed == 1


class NoReset(Lookup):
    closed = 0

    def close(self):
        NoReset.closed += 1

    def reset(self, example, seed):
        raise OSError("no database")


def test_environments_that_cannot_be_closed_are_reported_once_and_their_episodes_count(tmp_path, monkeypatch):
    def close(self):
        raise OSError("the container is gone")

    monkeypatch.setattr(Lookup, "close", close, raising=False)
    assert toy.trainer(config(tmp_path / "run")).run()
    events = toy.rows(tmp_path / "run", "events.jsonl")
    [message] = [event["message"] for event in events if event["kind"] == "environment-not-closed"]
    assert "the container is gone" in message
    assert all(row["environment/failed"] == 0 for row in toy.rows(tmp_path / "run", "metrics.jsonl"))

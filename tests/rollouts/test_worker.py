"""A rollout worker without Ray: its rollouts are the local engine's, bit for bit, and wrong weights are refused."""

import pytest
import torch

import toy
from alula.engine.rollout import Sampling
from alula.rollouts.job import Job
from alula.rollouts.job_queue import Needs
from alula.rollouts.weights import pack
from alula.rollouts.worker import Orders, RolloutWorker, Shipment, lora_tensors
from alula.sparsity.evict import METHODS
from alula.sparsity.policy import DENSE, Evict, Sparsity

TEXT = [[4, 5, 6, 7, 4, 5, 6, 7], [5, 5, 4, 7, 6]]
PROMPTS = [[4, 5, 6, 7, 4, 5, 6, 7, 5], [7, 6, 5], [4, 4, 4, 4, 4, 4]]


def shipment(named, number=0, version=0, **lora):
    return Shipment(number, version, [(pieces, data.copy()) for pieces, data in pack(named, 1 << 12)], **lora)


def worker_of(config):
    worker = RolloutWorker(config, 40, 1, fetch=list)
    worker.start()
    return worker


def work(worker, jobs, needs, **orders):
    """All rollouts of the jobs, in order."""
    report = worker.work(Orders([(number, job, needs) for number, job in enumerate(jobs)], **orders))
    assert report.rejected == []
    finished = list(report.finished)
    while worker.runner.unfinished:
        finished += worker.work(Orders()).finished
    return [rollout for _, rollout in sorted(finished, key=lambda pair: (pair[0], pair[1].sample_index))]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose learner's weights differ from those that a worker loads."""
    run = toy.trainer(
        toy.quick(
            tmp_path_factory.mktemp("run"), "engine={buckets: [8], max_length: 48, kv_memory: 16MiB}", "eval.every=0"
        )
    )
    run.train_step()
    return run


@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_worker_generates_what_the_local_engine_does(run, method, worker):
    sparsity = DENSE if method is None else Sparsity(Evict(method, 5, buffer=2, window=2, sinks=1))
    jobs = [Job(prompt, Sampling(n=3, max_new_tokens=9, seed=3), sparsity, 10 + i) for i, prompt in enumerate(PROMPTS)]
    run.rollouts.measure_queries(TEXT)
    expected = run.rollouts.generate(jobs)
    found = work(worker, jobs, Needs((0, -1)), text=TEXT)
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.logprobs, other.logprobs)
        assert (one.prompt_index, one.sample_index, one.finish, one.kv) == (
            other.prompt_index,
            other.sample_index,
            other.finish,
            other.kv,
        )


@pytest.fixture(scope="module")
def worker(run):
    worker = worker_of(run.config)
    worker.work(Orders(weights=shipment(run.learner.full_parameters(), version=1)))
    return worker


def test_acceptance_is_measured_where_the_tokens_were_sampled(run, worker):
    jobs = [
        Job(
            PROMPTS[0],
            Sampling(n=2, max_new_tokens=9),
            Sparsity(Evict("snapkv", 3, buffer=1, window=1, sinks=1)),
            0,
            keep_hidden=1,
        )
    ]
    found = work(worker, jobs, Needs((0, -1)))
    [watched, other] = run.rollouts.generate(jobs)
    [alpha] = run.rollouts.acceptance([watched])
    assert torch.equal(found[0].acceptance, alpha)
    assert found[0].hidden is found[1].acceptance is other.hidden is None
    assert alpha.min() < 0.99, "the test needs a mismatch"


def test_a_worker_with_other_weights_refuses_a_job(run):
    """A worker that was started anew has none, whatever it loaded."""
    worker, job = worker_of(run.config), Job(PROMPTS[0], Sampling(max_new_tokens=4))
    assert worker.work(Orders([(0, job, Needs(version=0))])).rejected == [0]
    weights = shipment(run.learner.full_parameters(), number=5, version=3)
    assert worker.work(Orders([(0, job, Needs((4, -1)))], weights=weights)).rejected == [0]
    assert worker.work(Orders([(0, job, Needs((5, 0)))])).rejected == [0], "another adapter"
    assert worker.work(Orders([(0, job, Needs(version=4))])).rejected == [0], "too old"
    [rollout] = work(worker, [job], Needs(version=2))
    assert [(span.version, span.tokens) for span in rollout.spans] == [(3, len(rollout))]


def test_a_worker_sleeps_until_there_is_work(run, worker):
    """New weights do not wake it."""
    jobs = [
        Job(PROMPTS[0], Sampling(n=2, max_new_tokens=9, seed=3), Sparsity(Evict("rkv", 5, buffer=2, window=2, sinks=1)))
    ]
    before = work(worker, jobs, Needs((0, -1)))
    worker.sleep()
    worker.work(Orders(weights=shipment(run.learner.full_parameters(), version=1)))
    assert not worker.engine.cache.resident
    after = work(worker, jobs, Needs((0, -1)))
    assert worker.engine.cache.resident
    assert [rollout.token_ids for rollout in before] == [rollout.token_ids for rollout in after]


def test_a_rollout_goes_on_over_an_update(run, worker):
    job = Job(PROMPTS[1], Sampling(max_new_tokens=30, seed=1, ignore_eos=True))
    worker.work(Orders(weights=shipment(run.learner.full_parameters(), number=8, version=8)))
    report = worker.work(Orders([(0, job, Needs(version=0))]))
    if not report.finished:
        report = worker.work(Orders(weights=shipment(run.learner.full_parameters(), number=9, version=9)))
    while worker.runner.unfinished:
        report = worker.work(Orders())
    [(_, rollout)] = report.finished
    assert [span.version for span in rollout.spans] in ([8], [8, 9])
    worker.work(Orders(weights=shipment(run.learner.full_parameters(), version=1)))


def test_a_trained_lora_is_merged_as_the_learner_does(tmp_path):
    run = toy.trainer(
        toy.quick(
            tmp_path,
            "learner.lora={rank: 2, alpha: 4}",
            "learner.lr=0.05",
            "engine={buckets: [8], max_length: 48, kv_memory: 16MiB}",
            "eval.every=0",
        )
    )
    worker = worker_of(run.config)
    for version in (1, 2):  # the second one starts from the base again
        run.train_step()
        adapter = run.learner.adapter()
        weights = shipment(lora_tensors(adapter), version, version, rank=adapter.rank, alpha=adapter.alpha)
        worker.work(Orders(weights=weights))
        expected = dict(run.learner.full_parameters())
        found = {name: parameter for name, parameter in worker.engine.model.named_parameters() if name in expected}
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert len(found) == len(expected)
    assert any(b.abs().max() > 0 for _, b in adapter.weights.values())


def test_progress_counts_tokens_also_of_unfinished_rollouts(run, worker, monkeypatch):
    monkeypatch.setattr("alula.rollouts.worker.SLICE", 0.0)
    job = Job(PROMPTS[1], Sampling(max_new_tokens=6, seed=1, ignore_eos=True))
    first = worker.work(Orders([(0, job, Needs(version=0))]))
    worker.runner.step()
    second = worker.work(Orders())
    assert second.progress > first.progress
    while worker.runner.unfinished:
        worker.runner.step()

"""The order of jobs, as properties: random workers, deaths, refusals and updates, without Ray."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alula.engine.rollout import Rollout, Sampling
from alula.errors import RunFailed
from alula.rollouts.job import Job
from alula.rollouts.job_queue import MOST_LOSSES, JobQueue, Needs


def job(index, n=1):
    return Job([1], Sampling(n=n), prompt_index=index)


def rollout(job, sample):
    return Rollout([1], [2], torch.zeros(1), "stop", prompt_index=job.prompt_index, sample_index=sample)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_batches_are_answered_in_order_and_no_job_starts_too_early(seed, stale, batch, batches, workers):
    """A learner that begins batches as far ahead as `stale` allows, and random workers that finish, die or refuse."""
    random, queue, begun = Random(seed), JobQueue(), 0
    running: list[dict[int, list[int]]] = [{} for _ in range(workers)]
    tickets: list[list[int]] = []
    started: dict[int, int] = {}
    answers: list[int] = []
    for version in range(batches):  # the learner has finished as many steps
        while begun <= min(version + stale, batches - 1):
            needs = Needs((version, -1)) if not stale else Needs(version=max(0, begun - stale))
            tickets.append([queue.put(job(begun * batch + i, n=2), needs) for i in range(batch)])
            begun += 1
        while not all(queue.tasks[number].done for number in tickets[version]):
            place = random.randrange(workers)
            jobs = running[place]
            happens = random.choice(["take", "finish", "finish", "finish", "die", "refuse"])
            if happens == "take":
                for task in queue.take(random.randint(1, 5), (version, -1), version):
                    assert version >= task.job.prompt_index // batch - stale, "started too early"
                    started.setdefault(task.number, version)
                    jobs[task.number] = [0, 1]
            elif happens == "finish" and jobs:
                number = random.choice(sorted(jobs))
                task = queue.tasks.get(number)
                sample = jobs[number].pop()
                if task is not None:
                    queue.finish(number, rollout(task.job, sample))
                if not jobs[number]:
                    del jobs[number]
            elif happens in ("die", "refuse") and jobs:
                known = [queue.tasks[n] for n in jobs if n in queue.tasks]
                lossy = happens == "die" and all(task.lost + 1 < MOST_LOSSES for task in known)
                queue.give_back(jobs, lost=lossy)
                jobs.clear()
        answers += [r.prompt_index for r in queue.pop(tickets[version])]
    assert answers == [i for i in range(batches * batch) for _ in range(2)], "all of them, in order, once"
    assert queue.tasks == {}
    assert queue.waiting == 0
    assert set(started) == {number for ticket in tickets for number in ticket}


def test_jobs_that_need_exact_weights_go_first():
    queue = JobQueue()
    ahead = [queue.put(job(i), Needs(version=0)) for i in range(2)]
    exact = queue.put(job(9), Needs((3, 1)))
    assert queue.take(9, (2, 1), 5) == [], "everything waits for weights that the worker does not have"
    assert [task.number for task in queue.take(2, (3, 1), 5)] == [exact, ahead[0]]
    assert [task.number for task in queue.take(2, (3, 1), 5)] == [ahead[1]]


def test_room_is_counted_in_rollouts_and_one_job_always_fits():
    queue = JobQueue()
    for i in range(4):
        queue.put(job(i, n=4), Needs())
    assert queue.waiting == 16
    assert len(queue.take(5, (0, 0), 0)) == 2
    assert len(queue.take(1, (0, 0), 0)) == 1
    assert queue.take(0, (0, 0), 0) == []
    assert queue.waiting == 4


def test_a_job_that_ends_its_workers_ends_the_run():
    queue = JobQueue()
    number = queue.put(job(7), Needs())
    for _ in range(MOST_LOSSES - 1):
        assert queue.take(1, (0, 0), 0)
        queue.give_back([number], lost=True)
    with pytest.raises(RunFailed, match=r"prompt 7 has ended 5 rollout workers"):
        queue.give_back([number], lost=True)


def test_late_answers_of_a_worker_that_was_given_up_are_dropped():
    queue = JobQueue()
    number = queue.put(job(0), Needs())
    assert queue.finish(number, rollout(job(0), 0))
    assert not queue.finish(number, rollout(job(0), 0))
    queue.pop([number])
    assert not queue.finish(number, rollout(job(0), 0))
    queue.give_back([number], lost=True)
    assert queue.waiting == 0

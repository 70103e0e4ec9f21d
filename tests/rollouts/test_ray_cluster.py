"""Rollouts on a simulated Ray cluster, a head and two nodes: equal to the local run, and death is normal.

`ALULA_KILLS=20` kills workers and nodes at twenty random moments instead of two; `ALULA_EVICTORS=all` compares whole
runs under every evictor instead of one (test_worker.py compares the rollouts of each).
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import yaml

import ray_ranks_worker
import toy
from alula.config.load import load_config
from alula.engine.rollout import Sampling
from alula.errors import RunFailed, SettingError
from alula.rollouts.job import Job
from alula.rollouts.ray_rollouts import connect
from alula.rollouts.worker_pool import WorkerPool
from alula.sparsity.evict import METHODS
from forked_ranks import run_on_nodes
from odd_worker import OddWorker
from processes import descendants

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "src" / "alula" / "recipes"
KILLS = int(os.environ.get("ALULA_KILLS", "2"))
NICENESS = "RAY_worker_niceness"
PINNED = ("engine={buckets: [8], kv_memory: 16MiB}", "sampling.prompts=6", "sampling.n=4", "eval={every: 2, size: 8}")
CONTROLLED = (
    "control={enabled: true, tau: 0.95, on_violation: adapt, ladder: [3, 4, 6]}",
    "monitor.rollouts=4",
    "logging.rollouts=2",
)
EVICTORS = list(METHODS) if os.environ.get("ALULA_EVICTORS") == "all" else ["triattention"]
RUNS = {
    "controlled": ("toy", ("steps=4", *CONTROLLED)),
    "reroll": ("toy", ("steps=2", "objective={correction: {preset: reroll, veto: 0.9}, kl: 0}")),
    "distill": (
        "distill-toy",
        ("steps=3", "distill.move.at=2", "distill.move.prompts=8", "distill.first={steps: 2, prompts: 8}"),
    ),
    "turns": ("turns-toy", ("steps=2",)),
} | {method: ("toy", ("steps=3", *CONTROLLED, f"sparsity={method}:3+1,window=1,sinks=1")) for method in EVICTORS}
COLOCATED = {"reroll": ("rollouts.colocated=true",)}
"""Runs whose workers sleep while the learner works."""


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ[NICENESS] = "0"  # workers are what is tested, and other tests run beside them
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2, num_gpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)


def settings_of(name, out, *more):
    recipe, settings = RUNS[name]
    return load_config(RECIPES / f"{recipe}.yaml", [f"out={out}", *PINNED, *settings, *more])


def on_workers(count):
    return ("rollouts.backend=ray", f"rollouts.workers={count}")


def comparable(out):
    """All that a run wrote, without times and without what depends on the number of engines."""
    engines = ("kv/bytes", "workers/")
    return {
        name: [{key: value for key, value in row.items() if not key.startswith(engines)} for row in rows]
        for name, rows in toy.files(out).items()
    }


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """What a run writes with a local engine."""
    found = {}

    def of(name):
        if name not in found:
            out = tmp_path_factory.mktemp("local") / name
            assert toy.trainer(settings_of(name, out)).run()
            found[name] = comparable(out)
        return found[name]

    return of


@pytest.mark.parametrize(
    ("name", "workers"),
    [("controlled", 1), ("controlled", 4), *((name, 2) for name in RUNS if name != "controlled")],
)
def test_a_run_on_workers_equals_the_local_one(cluster, local, tmp_path, name, workers):
    run = toy.trainer(settings_of(name, tmp_path / "run", *on_workers(workers), *COLOCATED.get(name, ())))
    assert run.run()
    assert comparable(tmp_path / "run") == local(name)
    last = toy.rows(tmp_path / "run", "metrics.jsonl")[-1]
    assert (last["workers/ready"], last["workers/lost"]) == (workers, 0)
    assert f"{workers} of {workers} rollout workers are ready." in toy.printed(run)


def rollout_processes():
    return [pid for pid in descendants(os.getpid()) if b"RolloutWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def add_node(cluster):
    cluster.add_node(num_cpus=2, num_gpus=1)


def remove_node(cluster):
    """A node with all that runs on it, at once: by themselves, its workers would answer for a while."""
    node = next(iter(cluster.worker_nodes))
    processes = descendants(node.all_processes["raylet"][0].process.pid)
    cluster.remove_node(node, allow_graceful=False)
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_worker_or_node_costs_only_time(cluster, local, tmp_path, seed):
    """Even seeds kill a worker's process, odd ones a node, which returns; while the run waits for some rollouts."""
    run = toy.trainer(settings_of("controlled", tmp_path / "run", *on_workers(2), "rollouts.gpus_per_worker=1"))
    chance = random.Random(seed)
    left = [chance.randint(1, 10)]

    def kill():  # called whenever the run waits; in the main thread, since Ray starts nodes there only
        left[0] -= 1
        if left[0] == 0 and seed % 2 == 0:
            os.kill(chance.choice(rollout_processes()), signal.SIGKILL)
        elif left[0] == 0:
            remove_node(cluster)
            add_node(cluster)

    run.rollouts.check_stop = kill
    assert run.run()
    assert left[0] <= 0, "it was killed"
    assert comparable(tmp_path / "run") == local("controlled")


def test_below_min_workers_the_run_waits_for_a_late_joiner(cluster, local, tmp_path):
    """One of two nodes goes, and returns only after the run has said that it waits."""
    settings = (*on_workers(2), "rollouts.min_workers=2", "rollouts.gpus_per_worker=1")
    run = toy.trainer(settings_of("controlled", tmp_path / "run", *settings))
    remove_node(cluster)
    returned = []

    def bring_back():
        if "waiting for others" in toy.printed(run) and not returned:
            returned.append(add_node(cluster))

    run.rollouts.check_stop = bring_back
    assert run.run()
    assert "1 of 2 rollout workers are left, and rollouts.min_workers is 2: waiting for others." in toy.printed(run)
    assert "2 rollout workers are ready: going on." in toy.printed(run)
    assert comparable(tmp_path / "run") == local("controlled")


def test_a_run_that_was_stopped_goes_on_with_other_workers(cluster, local, tmp_path):
    stopped = toy.trainer(settings_of("controlled", tmp_path / "run", *on_workers(2), "checkpoint.every=1"))
    train_step = stopped.train_step

    def twice():
        train_step()
        stopped.stop.requested = stopped.step == 2

    stopped.train_step = twice
    assert not stopped.run()
    resumed = toy.trainer(settings_of("controlled", tmp_path / "run", *on_workers(1)), resume=True)
    assert resumed.run()
    assert comparable(tmp_path / "run") == local("controlled")


def test_two_learner_ranks_share_one_pool(cluster, tmp_path, monkeypatch):
    """Ranks draw the same tokens as one, and their numbers differ by rounding."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    run_on_nodes("ray_ranks_worker", {(1, 2): tmp_path / "two"})
    assert toy.trainer(toy.toy(tmp_path / "one", *ray_ranks_worker.PINNED)).run()
    one, two = (comparable(tmp_path / ranks)["metrics.jsonl"] for ranks in ("one", "two"))
    for mine, theirs in zip(one, two, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_rollouts_ahead_of_the_learner(cluster, tmp_path):
    settings = (*on_workers(2), "rollouts.stale=1", "steps=5", "checkpoint.every=2")
    run = toy.trainer(settings_of("controlled", tmp_path / "run", *settings))
    drawn = []
    submit = run.rollouts.submit

    def watched(jobs, *, least=None):
        if least is not None:
            drawn.append((run.step, jobs[0].prompt_index // 6, least))
        return submit(jobs, least=least)

    run.rollouts.submit = watched
    assert run.run()
    assert drawn == [(0, 0, 0), (0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 4, 3)], "one batch ahead, and none past the end"
    rows = toy.rows(tmp_path / "run", "metrics.jsonl")
    assert [row["data/epoch"] * len(run.stream.dataset) for row in rows] == pytest.approx([6, 12, 18, 24, 30])
    assert all(0 <= row["workers/age_mean"] <= row["workers/age_max"] <= 1 for row in rows)
    rollouts = 6 * run.config.sampling.n
    for row in rows:  # the wait for a batch may be next to nothing
        tokens = rollouts * row["response/length_mean"]
        assert row["speed/tokens_per_s"] * row["time/step"] == pytest.approx(tokens)
    assert rows[0]["mismatch/current_tokens"] == 1
    assert any(row["mismatch/current_tokens"] < 1 for row in rows)
    assert run.checkpoint_state["position"] == run.collector.position


# -- the pool, with actors that do nothing ----------------------------------------------------------------


def wait_for(pool, numbers):
    end = time.monotonic() + 120
    while time.monotonic() < end and not pool.done(numbers):
        pool.finished(numbers, set(), 0.1)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("hangs", RunFailed, "has ended 2 rollout workers"),
        ("dies", RunFailed, "has ended 2 rollout workers"),
        ("dies at the start", RunFailed, "workers die while they start"),
        ("raises", SettingError, "prompts: too long"),
    ],
)
def test_a_pool_of_odd_workers_ends_with_a_reason(cluster, monkeypatch, what, error, message):
    from alula.rollouts.worker import Shipment

    monkeypatch.setattr("alula.rollouts.job_queue.MOST_LOSSES", 2)
    actor = ray.remote(OddWorker).options(num_cpus=0)
    pool = WorkerPool(lambda: actor.remote(what), 1, 1, timeout=1.5 if what == "hangs" else 60, rows=8)
    try:
        pool.ship(weights=Shipment(0, 0, []))
        numbers = pool.submit([(Job([1], Sampling()), None)])
        with pytest.raises(error, match=message):
            wait_for(pool, numbers)
        assert len(pool.messages) >= (0 if what == "raises" else 2)
    finally:
        pool.close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere.invalid:6379"])
def test_an_address_where_nobody_answers(address):
    began = time.monotonic()
    with pytest.raises(SettingError, match=rf"rollouts\.address={address}: no Ray cluster answers"):
        connect(address)
    assert time.monotonic() < began + 30, "not after Ray's own minutes"


def test_too_many_workers_for_the_cluster(cluster, monkeypatch):
    actor = ray.remote(OddWorker).options(num_cpus=0, num_gpus=1)
    pool, said = WorkerPool(lambda: actor.remote("waits"), 3, 3, timeout=4, rows=8), []
    monkeypatch.setattr("alula.rollouts.worker_pool.PATIENCE", 1.0)
    try:
        with pytest.raises(RunFailed, match=r"rollouts\.workers=3: [0-2] were ready .* CPUs and 2 GPUs"):
            pool.wait_until_ready(lambda: None, said.append)
        assert len(said) == 1
        assert said[0].startswith("waiting for rollout workers: ")
    finally:
        pool.close()


def test_workers_that_a_cluster_on_this_machine_can_never_start(tmp_path):
    command = [sys.executable, "-m", "alula", "train", "toy", f"out={tmp_path / 'run'}", "rollouts.backend=ray"]
    settings = ["rollouts.address=local", "rollouts.gpus_per_worker=9"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "rollouts.gpus_per_worker=9: 1 worker would need 9 GPUs, but Ray finds 0 on this machine" in done.stderr


def test_recipes_stay_local_by_default():
    for recipe in RECIPES.glob("*.yaml"):
        assert "rollouts" not in yaml.safe_load(recipe.read_text())

"""Cores that a process may use."""

import os
from pathlib import Path

import pytest

from alula.cgroups import cpu_quota
from alula.cpus import SMALL_MODEL, available_cpus, threads_for


def test_cpu_quota_is_read_in_both_versions(tmp_path: Path):
    group = tmp_path / "process"
    assert cpu_quota(tmp_path, group) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, group) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path, group) == 2
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path, group) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("400000\n")
    assert cpu_quota(tmp_path, group) == 4


def test_tightest_group_around_the_process_counts(tmp_path: Path):
    group = tmp_path / "process"
    group.write_text("1:cpuset:/x\n0::/user.slice/job\n")
    (tmp_path / "user.slice" / "job").mkdir(parents=True)
    (tmp_path / "user.slice" / "job" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "user.slice" / "cpu.max").write_text("300000 100000\n")
    assert cpu_quota(tmp_path, group) == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_affinity_limits_the_cores():
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert available_cpus() == 1
    finally:
        os.sched_setaffinity(0, cores)


def test_threads_follow_omp_then_the_record_then_the_size_of_the_model(monkeypatch):
    monkeypatch.setattr("alula.cpus.available_cpus", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_for(SMALL_MODEL - 1) == 1
    assert threads_for(SMALL_MODEL) == 6
    assert threads_for(SMALL_MODEL, recorded=3) == threads_for(1, recorded=3) == 3
    for text, threads in (("2", 2), ("4,2", 4), ("", 6), ("0", 6), ("many", 6)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert threads_for(SMALL_MODEL) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_for(1, recorded=3) == 2

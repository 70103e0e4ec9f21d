"""The leaderboard: bytes against what the engine allocates, budgets of equal bytes, paired intervals, the command."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.engine.measure_queries import TEXT_PROMPTS
from alula.engine.sequence import kind_of
from alula.mismatch.calibrate.calibrate import TextSettings
from alula.mismatch.calibrate.verify import verify
from alula.mismatch.leaderboard.kv_bytes import fit_budget, kv_bytes
from alula.mismatch.leaderboard.rank import paired_difference, ranks
from alula.mismatch.leaderboard.row import NEVER, DenseText, Row, Sample, measure_row
from alula.mismatch.leaderboard.table import tables
from alula.models.load import load_model
from alula.models.lora import init_adapter
from alula.objective.veto import Share
from alula.sparsity.evict.query_statistics import QueryStatistics
from alula.sparsity.family import parse_families
from alula.sparsity.schedule import Schedule
from command_line import alula

PROMPT, NEW, PAGE = 9, 40, 4
SMALL = {"buffer": 5, "window": 3, "sinks": 2}
POLICIES = {
    "dense": Sparsity(),
    "rkv": Sparsity(Evict("rkv", 14, **SMALL)),
    "h2o": Sparsity(Evict("h2o", 14, **SMALL)),
    "protected": Sparsity(Evict("vase", 10, **SMALL, protect_prompt=True)),
    "quest": Sparsity(select=Select("quest", 16, PAGE, 1)),
    "both": Sparsity(Evict("snapkv", 24, **SMALL), Select("block-topk", 12, PAGE, 1)),
}


@pytest.fixture(scope="module")
def engine():
    return Engine.load("shape:tiny-qwen3", page=PAGE, kv_memory="4MiB", max_rows=32)


@pytest.mark.parametrize("name", POLICIES)
def test_bytes_are_those_that_the_engine_allocates_and_reads(name, engine):
    policy, g = POLICIES[name], engine.geometry
    sampling = Sampling(max_new_tokens=NEW, ignore_eos=True)
    [rollout] = engine.generate([list(range(3, 3 + PROMPT))], sampling, policy, progress=False)
    found = kv_bytes(g, PAGE, policy, [(PROMPT, NEW)])
    state = engine.runner.batches[kind_of(policy, adapted=False)]
    extra = 0
    if policy.evict and policy.evict.method != "h2o":
        ring = state.ring[:, 0, :, : policy.evict.window]
        extra += ring.numel() * ring.element_size()
    if policy.evict and policy.evict.method == "h2o":
        extra += 4 * g.layers * g.kv_heads * rollout.kv.peak_tokens
    if policy.select:
        summary = engine.cache.summaries[policy.select.method][:, 0]
        extra += rollout.kv.peak_pages * summary.numel() * summary.element_size()
    assert found.peak == rollout.kv.peak_pages * PAGE * g.kv_token_bytes + extra
    assert found.held <= found.peak
    if policy.select is None:
        assert found.read == pytest.approx(rollout.kv.mean_bytes)
    else:
        dense, selecting = 1, g.layers - 1
        tokens = (dense * rollout.kv.mean_tokens + selecting * rollout.kv.mean_read_tokens) / g.layers
        assert tokens * g.kv_token_bytes < found.read < tokens * g.kv_token_bytes + extra


def test_the_largest_budget_that_fits_is_found():
    for family in parse_families("rkv:buffer=3:window=2:sinks=1,quest", (4,)):
        sizes = {b: 10 * b + 7 for b in range(family.part.least_budget, 90)}
        measure = lambda policy: sizes[(policy.select or policy.evict).budget]  # noqa: B023, E731
        for limit in (0, 10 * family.part.least_budget + 7, 333, 700, 10_000):
            expected = max((b for b, size in sizes.items() if size <= limit), default=None)
            assert fit_budget(family, limit, 90, measure) == expected
    assert parse_families("rkv:window=5:sinks=2")[0].part.least_budget == 7
    assert parse_families("quest", (4,))[0].part.least_budget == 12


def sample(vetoed):
    return Sample(tuple(0 if v else NEVER for v in vetoed), (1.0,) * len(vetoed), (5,) * len(vetoed), (1.0, 1.0, 1.0))


def test_paired_intervals_cover_and_are_newcombes_without_correlation():
    a, b = sample([True] * 20 + [False] * 80), sample(([True] + [False] * 9) * 10)
    difference, lower, upper = paired_difference(a, b, 1)
    assert np.corrcoef([v == 0 for v in a.vetoed], [v == 0 for v in b.vetoed])[0, 1] == pytest.approx(0)
    (l1, u1), (l2, u2) = Share(20, 100).interval, Share(10, 100).interval
    assert difference == pytest.approx(0.1)
    assert lower == pytest.approx(0.1 - math.hypot(0.2 - l1, u2 - 0.1))
    assert upper == pytest.approx(0.1 + math.hypot(u1 - 0.2, 0.1 - l2))
    rng, inside = np.random.default_rng(0), 0
    for _ in range(600):
        hard = rng.random(64) < 0.3  # prompts that are hard for both
        one, other = hard & (rng.random(64) < 0.8), hard & (rng.random(64) < 0.5)
        _, lower, upper = paired_difference(sample(one), sample(other), 1)
        inside += lower <= 0.3 * 0.3 <= upper
    assert 0.92 < inside / 600 < 0.99


def test_ranks_are_apart_only_where_the_interval_excludes_zero():
    best, same, worst = sample([False] * 64), sample([True] + [False] * 63), sample([True] * 40 + [False] * 24)
    assert ranks([worst, best, same], 1) == [(3, 3), (1, 2), (1, 2)]
    assert ranks([best, best], 1) == [(1, 2), (1, 2)]


def test_a_row_agrees_with_verify(engine):
    prompts = tuple(tuple(range(3 + i, 10 + i)) for i in range(20))
    text = TextSettings(prompts, 28, samples=2, temperature=1.5)
    dense = DenseText.of(engine, engine.generate([list(p) for p in prompts], text.sampling, progress=False))
    policy = Sparsity(Evict("streaming", 8, buffer=2, window=2, sinks=1))
    names = {"family": "streaming", "target": 10, "step_ms": 1.0}
    row = measure_row(engine, policy, text, dense, **names)
    other = verify(engine, Schedule((8,), 64), policy, text, None)
    assert row.own.share(2) == other.vetoed
    assert row.own.tail[0] == pytest.approx(float(other.tail.value[0]))
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row
    floor = measure_row(engine, Sparsity(), text, dense, **names)
    assert floor.own.share(2).count == floor.text.share(2).count == 0
    assert min(floor.own.acceptance + floor.text.acceptance) > 0.999
    alphas = engine.acceptance(dense.rollouts, policy)
    assert row.text.acceptance == pytest.approx([float(a.mean()) for a in alphas], abs=1e-6)


def test_the_command_writes_prints_and_continues(tmp_path, capsys, monkeypatch):
    out = tmp_path / "board.json"
    common = ["calibrate", "shape:tiny-llama", "--data", "task:copy-last", "--leaderboard", "--length", 32]
    common += ["--prompts", 20, "--pages", 4, "--kv-memory", "8MiB", "--device", "cpu", "--out", out]
    methods = "rkv:buffer=2:window=2:sinks=1,quest:dense_layers=0,streaming:buffer=2:window=30"
    assert alula(*common, "--budgets", 16, "--methods", methods) == 0
    printed, record = capsys.readouterr().out, json.loads(out.read_text())
    assert tables(record) in printed
    assert [row["family"] for row in record["held"]] == ["rkv:buffer=2:window=2:sinks=1"]
    assert {row["family"].split(":")[0] for row in record["read"]} == {"rkv", "quest"}
    assert record["token_bytes"] == 2 * 3 * 4 * 16 * 4, "keys and values of tiny-llama in fp32"
    limit = 16 * record["token_bytes"]
    assert all(row["kv"]["peak"] <= limit for row in record["held"])
    assert "streaming:buffer=2:window=30: left out of the table of bytes held" in printed
    assert len(record["left_out"]) == 2
    assert {row["step_ms"] for row in record["held"] + record["read"] + record["dense"]} == {None}, "CPU times"
    assert alula(*common, "--budgets", 16, "--methods", methods) == 0
    printed = capsys.readouterr().out
    assert "at the bytes of" not in printed, "what was measured is kept"
    assert "dense text: " not in printed, "so is the text"
    assert json.loads(out.read_text()) == record
    assert alula(*common, "--budgets", 16, "--methods", "knorm:buffer=2:window=2:sinks=1", "--kv-dtype", "fp8") == 0
    printed, longer = capsys.readouterr().out, json.loads(out.read_text())
    assert tables(longer) in printed, "rows of both commands"
    for table in ("dense", "held", "read"):
        before = len(record[table])
        assert longer[table][:before] == record[table], "what another command measured stays"
        assert len(longer[table]) > before
    assert {row["kv_dtype"] for row in longer["held"]} == {None, "fp8"}
    record = longer
    assert alula(*common, "--seed", 1) == 2
    assert "was written with weights=" in capsys.readouterr().err
    init_adapter(load_model("shape:tiny-llama").model, 2, 4.0, ["all"], 0).save(tmp_path / "adapter")
    assert alula(*common, "--sparse-adapter", tmp_path / "adapter") == 2
    assert "was written with adapter=none" in capsys.readouterr().err

    more, work = (
        [*common, "--methods", "knorm:buffer=2:window=2:sinks=1", "--budgets", 16],
        tmp_path / "board.work.json",
    )
    out.rename(tmp_path / "kept.json")
    assert alula(*more, "--temperature", 0.7) == 2
    assert "board.work.json was written with temperature=1.0" in capsys.readouterr().err
    text = work.read_text()
    work.write_text(text[:100])
    assert alula(*more) == 2
    assert f"work file {work}: damaged" in capsys.readouterr().err
    work.write_text(text)
    out.write_text(text)
    assert alula(*more) == 2
    assert f"--out {out}: damaged, or of another command" in capsys.readouterr().err
    (tmp_path / "kept.json").rename(out)

    def stopped(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("alula.cli.leaderboard.measure_row", stopped)
    assert alula(*common, "--budgets", "12,16", "--methods", methods) == 130
    policies = {row["policy"] for table in ("held", "read") for row in json.loads(out.read_text())[table]}
    assert policies == {row["policy"] for table in ("held", "read") for row in record[table]}, "nothing is lost"


@pytest.mark.parametrize(("option", "timed"), [([], True), (["--timing"], True), (["--no-timing"], False)])
def test_steps_are_timed_on_a_gpu_unless_turned_off(tmp_path, monkeypatch, option, timed):
    monkeypatch.setattr("alula.cli.leaderboard.milliseconds", lambda *_: 1.5)
    out = tmp_path / "board.json"
    command = ["calibrate", "shape:tiny-llama", "--data", "task:copy-last", "--leaderboard", "--length", 32]
    command += ["--prompts", 20, "--pages", 4, "--kv-memory", "8MiB", "--device", "cpu", "--out", out]
    command += ["--budgets", 16, "--methods", "streaming:buffer=2:window=2:sinks=1", *option]
    assert alula(*command) == 0
    record = json.loads(out.read_text())
    rows = record["dense"] + record["held"] + record["read"]
    assert len(rows) == 3
    assert [row["step_ms"] for row in rows] == [1.5 if timed else None] * 3
    assert all(line.endswith("|  |") != timed for line in tables(record).splitlines() if line.startswith("| dense"))


def test_quantised_kv_is_compared_at_the_same_bytes(tmp_path, capsys):
    out = tmp_path / "board.json"
    command = ["calibrate", "shape:tiny-llama", "--data", "task:copy-last", "--leaderboard", "--length", 72]
    command += ["--prompts", 20, "--pages", 4, "--kv-memory", "8MiB", "--device", "cpu", "--out", out]
    command += ["--budgets", "8,32", "--methods", "streaming:buffer=2:window=2:sinks=1", "--kv-dtype"]
    assert alula(*command, "fp9") == 2
    assert "kv_dtype=fp9: must be int8 or fp8" in capsys.readouterr().err
    assert not out.exists(), "nothing was measured"
    command += ["fp8"]
    assert alula(*command) == 0
    printed, record = capsys.readouterr().out, json.loads(out.read_text())
    assert [row["kv_dtype"] for row in record["dense"]] == [None, "fp8"]
    floor, whole = (Row.from_dict(row) for row in record["dense"])
    assert whole.kv.held == pytest.approx(floor.kv.held * 17 / 64, rel=0.05), "its answers differ"
    assert floor.own.share(1).count == 0
    plain, wide, quantised, all_tokens = (Row.from_dict(row) for row in record["held"])
    assert [row.kv_dtype for row in (plain, wide, quantised, all_tokens)] == [None, None, "fp8", "fp8"]
    assert max(plain.kv.peak, quantised.kv.peak) <= 8 * record["token_bytes"]
    assert tokens_kept(quantised.policy) > 2 * tokens_kept(plain.policy), "17 instead of 64 bytes per vector"
    assert (all_tokens.policy, all_tokens.target) == ("dense", 32), "quantised, all of them fit"
    assert all_tokens.kv.peak <= 32 * record["token_bytes"]
    first, second, *_ = [part.splitlines() for part in printed.split("**Equal bytes")[1:]]
    names = [[row.split(" | ")[:2] for row in part if row.startswith("| ")] for part in (first, second)]
    assert names[0][-2:] == [["| dense in fp8", "larger"], ["| dense", "floor"]]
    assert [name for name, _ in names[1]].count("| dense in fp8") == 1


def test_statistics_of_queries_come_from_the_dense_text(tmp_path):
    """Also where KV is quantised or kept in other pages, and where the command added to the file."""
    out, alone = tmp_path / "board.json", tmp_path / "alone.json"
    command = ["calibrate", "shape:tiny-llama", "--data", "task:copy-last", "--leaderboard", "--length", 48]
    command += ["--prompts", 20, "--pages", 4, "--kv-memory", "8MiB", "--device", "cpu", "--budgets", 16]
    other, tri = "knorm:buffer=2:window=2:sinks=1", "triattention:buffer=2:window=2:sinks=1"
    files = [tmp_path / "first.pt", tmp_path / "second.pt"]
    assert alula(*command, "--methods", tri, "--out", alone, "--statistics", files[0]) == 0
    assert alula(*command, "--methods", other, "--out", out) == 0
    assert alula(*command, "--methods", tri, "--out", out, "--kv-dtype", "fp8", "--statistics", files[1]) == 0
    first, second = map(QueryStatistics.load, files)
    text = json.loads(out.with_suffix(".work.json").read_text())["text"]
    assert second.text == tuple((*prompt, *answer) for at, _, prompt, answer in text if at < TEXT_PROMPTS)
    assert torch.equal(first.mean, second.mean)
    [row] = json.loads(alone.read_text())["held"]
    assert row in json.loads(out.read_text())["held"]


def tokens_kept(policy: str) -> int:
    return int(policy.split(":")[1].split("+")[0])


def test_the_page_shows_what_its_raw_file_says():
    folder = Path(__file__).parents[2] / "docs" / "results"
    page = (folder / "leaderboard.md").read_text()
    raw = [path for path in sorted((folder / "leaderboard").glob("*.json")) if ".work" not in path.suffixes]
    assert raw
    for file in raw:
        assert tables(json.loads(file.read_text())) in page, file.name

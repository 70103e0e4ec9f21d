"""`alula generate`, `alula bench` and the README's quickstart, run as documented."""

import io
import json
import re
from pathlib import Path

import pytest

from alula import Engine, Evict, Sampling, Sparsity
from alula.cli.common import check_output_file
from command_line import output_of

ROOT = Path(__file__).parents[2]
MODEL = "shape:tiny-qwen3"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": [1, 2, 3, 4]}\n\n{"prompt": [5], "answer": 7}\n')
    return tmp_path


@pytest.mark.slow
def test_the_quickstart_works_as_pasted(capsys):
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code, {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("200 tokens, KV saved 64%, 10 evictions, |Δ log-prob| 0.") for line in lines)


def test_tests_named_in_the_engine_docs_exist():
    page = (ROOT / "docs" / "engine.md").read_text()
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", page)
    assert sum(bool(test) for _, test in named) >= 10
    for file, test in named:
        assert not test or f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


@pytest.mark.slow
def test_generate_writes_the_rollouts_of_the_engine(capsys):
    ask = (
        "generate",
        MODEL,
        "--file",
        "prompts.jsonl",
        "--sparsity",
        "rkv:32+16,sinks=2",
        "--n",
        2,
        "--ignore-eos",
        "--max-new-tokens",
        60,
        "--temperature",
        0.8,
        "--seed",
        3,
        "--topk-logprobs",
        2,
    )
    code, out, err = output_of(capsys, *ask)
    assert (code, err) == (0, "")
    engine = Engine.load(MODEL, kv_memory="1MiB", max_rows=8)
    expected = engine.generate(
        [[1, 2, 3, 4], [5]],
        Sampling(n=2, max_new_tokens=60, temperature=0.8, seed=3, ignore_eos=True, topk_logprobs=2),
        Sparsity(Evict("rkv", 32, buffer=16, sinks=2)),
    )
    for line, rollout in zip(out.splitlines(), expected, strict=True):
        record = json.loads(line)
        key = (rollout.prompt_index, rollout.sample_index)
        assert (record["prompt_index"], record["sample_index"]) == key
        assert (record["prompt_ids"], record["token_ids"]) == (rollout.prompt_ids, rollout.token_ids)
        assert record["logprobs"] == pytest.approx(rollout.logprobs.tolist(), abs=2e-5)
        assert record["topk_ids"] == rollout.topk_ids.tolist()
        assert (record["finish"], record["sparsity"], record["text"]) == ("length", "rkv:32+16,sinks=2", None)
        assert record["kv"] == vars(rollout.kv) | {"saved": rollout.kv.saved}
    for again in ("first", "over it"):
        assert output_of(capsys, *ask, "-o", "new/folder/out.jsonl") == (0, "", ""), again
        assert Path("new/folder/out.jsonl").read_text() == out


def test_generate_reads_standard_input_and_cuts_the_distribution(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": [9, 8]}\n'))
    code, out, _ = output_of(
        capsys, "generate", MODEL, "--file", "-", "--top-k", 3, "--max-new-tokens", 4, "--ignore-eos"
    )
    record = json.loads(out)
    assert code == 0
    assert (record["prompt_ids"], len(record["token_ids"]), record["logprobs"]) == ([9, 8], 4, None)


def test_a_full_disk_ends_a_command_with_one_line(capsys):
    ask = ("generate", MODEL, "--file", "prompts.jsonl", "--max-new-tokens", 2)
    code, _, err = output_of(capsys, *ask, "-o", "/dev/full")
    assert (code, err.count("\n")) == (1, 1)
    assert "No space left on device" in err


@pytest.mark.slow
def test_generate_loads_with_the_block_of_the_selector_as_page(capsys):
    policy = "snapkv:64+16 & quest:24,block=8,dense_layers=1"
    code, out, _ = output_of(capsys, "generate", MODEL, "--file", "prompts.jsonl", "--sparsity", policy, "--ignore-eos")
    kv = [json.loads(line)["kv"] for line in out.splitlines()]
    assert code == 0
    assert all(0 < use["mean_read_tokens"] < use["mean_tokens"] < use["dense_mean_tokens"] for use in kv)


def test_standard_input_that_is_not_utf8_raises(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "\xfc"}\n'), encoding="utf-8"))
    code, _, err = output_of(capsys, "generate", MODEL, "--file", "-")
    assert (code, err) == (2, "alula: --file -: standard input is not UTF-8; convert it.\n")


def test_check_of_the_output_file_creates_and_changes_nothing():
    Path("kept.txt").write_text("kept")
    for out in (None, Path("kept.txt"), Path("new/out.txt"), Path("/dev/null")):
        check_output_file(out)
    assert Path("kept.txt").read_text() == "kept"
    assert list(Path("new").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompts: "),
        (["hello"], "shape:tiny-qwen3 has no tokenizer"),
        (["--file", "none.jsonl"], "--file none.jsonl: "),
        (["--file", "text.txt"], "line 1: not a JSON object"),
        (["--file", "odd.jsonl"], "must be text, chat messages or token ids."),
        (["--sparsity", "rvk:64+16"], "'rvk'; did you mean 'rkv'?"),
        (["--sparsity", "rkv:64+16,windw=4"], "did you mean 'window'?"),
        (["--sparsity", "rkv:64+16,budget=32"], "budget twice"),
        (["--sparsity", "rkv:8+2"], "budget=8 "),
        (["--max-new-tokens", "9000"], "max_new_tokens=9000 goes beyond the model's 4096 positions"),
        (["--file", "latin.jsonl"], "--file latin.jsonl, line 2: not UTF-8"),
        (["--out", "/proc/none/out.jsonl"], "--out /proc/none/out.jsonl: "),
        (["--out", "/proc/out.jsonl"], "--out /proc/out.jsonl: "),
        (["--out", "."], "--out .: "),
        (["--out", "prompts.jsonl/out"], "--out prompts.jsonl/out: "),
        (["--dtype", "int8"], "dtype=int8: "),
        (["--residual", "float16"], "residual=float16: "),
        (["--device", "tpu"], "device=tpu: "),
        (["--kv-memory", "much"], "kv_memory='much': "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.slow
def test_generate_rejects_bad_input_in_one_line(capsys, arguments, message):
    Path("text.txt").write_text("a plain line\n")
    Path("odd.jsonl").write_text('{"prompt": null}\n')
    Path("latin.jsonl").write_bytes(b'{"prompt": [1]}\n{"prompt": "\xfc"}\n')
    given = (
        arguments if "--file" in arguments or arguments in ([], ["hello"]) else ["--file", "prompts.jsonl", *arguments]
    )
    code, out, err = output_of(capsys, "generate", MODEL, *given)
    assert (code, out) == (2, "")
    assert err.startswith("alula: ")
    assert message in err
    assert err.count("\n") == 1


POLICIES = ("dense", "rkv:32+16", "h2o:32+16", "block-topk:64", "snapkv:128+16 & quest:64")
COMMON = ("--batch", 2, "--batch", 3, "--context", 20, "--context", 300, "--kv-memory", "8MiB")


@pytest.mark.slow
def test_bench_times_steps_and_rollouts(capsys):
    policies = [word for policy in POLICIES for word in ("--sparsity", policy)]
    ask = ("bench", MODEL, *COMMON, "--rollouts", 3, "--json", "--out", "bench.json", *policies)
    code, out, err = output_of(capsys, *ask)
    assert (code, err) == (0, "")
    records = [json.loads(line) for line in out.splitlines()]
    assert len(records) == 2 * 5 * 2 * 2
    saved = json.loads(Path("bench.json").read_text())
    assert saved["records"] == records
    token, weights = 2 * 3 * 2 * 16 * 4, saved_weights()
    for r in records[::2]:
        most = {"rkv:32+16": 48, "h2o:32+16": 48, "snapkv:128+16 & quest:64": 144}.get(r["sparsity"], 10**9)
        held = min(r["context"], most)
        assert r["kv_bytes"] == r["batch"] * held * token, "with an evictor: the KV held at that length"
        assert r["timing"]["context"] == held
        assert r["of_floor"] == pytest.approx(r["floor_ms"] / r["ms"])
        assert r["tokens_per_s"] == pytest.approx(1e3 * r["batch"] / r["ms"])
        if r["sparsity"] in POLICIES[:3]:
            assert r["floor_ms"] == pytest.approx(1e3 * (weights + r["kv_bytes"]) / saved["bandwidth"])
    for r in records[1::2]:
        assert (r["kind"], r["new_tokens"]) == ("rollouts", 3)
        assert r["tokens_per_s"] == pytest.approx(3 * r["batch"] / r["seconds"])


def saved_weights() -> int:
    """Bytes of tiny-qwen3, whose head is its embedding table."""
    model = Engine.load(MODEL, kv_memory="1MiB", max_rows=1).model
    return sum(4 * p.numel() for p in model.parameters())


@pytest.mark.slow
def test_bench_table_is_not_truncated_in_a_pipe(capsys):
    code, out, err = output_of(capsys, "bench", MODEL, *COMMON, "--sparsity", POLICIES[-1], "--rollouts", 2)
    assert (code, err) == (0, "")
    for word in ("sparsity", "batch", "context", "floor ms", "of floor", "tokens/s", "MiB", "rollouts + 2", "TB/s"):
        assert word in out
    assert out.count("snapkv:128+16 & quest:64") == 8
    assert "…" not in out


@pytest.mark.slow
def test_bench_accepts_contexts_beyond_the_positions_of_the_model(capsys):
    """RoPE tables and pages are sized for the requested context."""
    ask = ("bench", MODEL, "--batch", 1, "--context", 5000, "--kv-memory", "8MiB", "--json")
    code, out, _ = output_of(capsys, *ask)
    assert code == 0
    assert json.loads(out)["context"] == 5000


@pytest.mark.slow
def test_bench_takes_the_page_size_from_the_selector(capsys):
    ask = ("bench", MODEL, "--batch", 1, "--context", 128, "--kv-memory", "8MiB", "--json")
    code, out, _ = output_of(capsys, *ask, "--sparsity", "dense", "--sparsity", "quest:96,block=32")
    assert code == 0
    assert len(out.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch 0: "),
        (["--context", "0"], "--context 0: "),
        (["--rollouts", "-1"], "--rollouts -1: "),
        (["--batch", "2000"], "batch=2000, context=32: needs 6000 pages"),
        (["--sparsity", "quest:128,block=32", "--sparsity", "quest:128"], "--sparsity: block sizes [16, 32] "),
        (["--page", "12"], "page=12: "),
        (["--out", "/proc/none/x.json"], "--out /proc/none/x.json: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.slow
def test_bench_rejects_bad_input_in_one_line(capsys, arguments, message):
    code, out, err = output_of(capsys, "bench", MODEL, "--kv-memory", "1MiB", "--context", 32, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1

"""`alula eval` from the command line: several policies, one table, results on disk."""

import gc
import json
import shutil
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alula.cli.eval import list_entries
from alula.cli.main import app
from alula.data.benchmarks import BENCHMARKS
from alula.data.tasks import build
from alula.data.tasks.tokenizer import task_tokenizer
from alula.engine.engine import Engine
from alula.evals.suites import SUITES
from alula.models.lora import init_adapter


@pytest.fixture
def folder(tmp_path):
    """A tiny model with the task's tokenizer, as a Hugging Face folder."""
    tokenizer = task_tokenizer(build("copy-last"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*arguments):
    try:
        app([str(word) for word in arguments])
    except SystemExit as done:
        return done.code
    return 0


@pytest.mark.parametrize("always", [True, False])
def test_answers_that_cannot_be_graded_are_reported(folder, tmp_path, monkeypatch, capsys, always):
    (tmp_path / "grading.py").write_text(
        "def strict(completion, example):\n"
        f"    return {{}}['x'] if {always} or example['prompt'] == example['first'] else 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": prompt, "answer": "a", "first": "a b"} for prompt in ("a b", "b a", "c a")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "results.json"
    command = ["eval", folder, "--data", tmp_path / "data.jsonl", "--max-new-tokens", 4, "--out", out]
    assert run(*command, "--reward", "grading:strict") == always
    printed = capsys.readouterr().err
    if always:
        assert (
            "the reward grading:strict failed on every one of the 3 answers, most often with \"KeyError: 'x'" in printed
        )
    else:
        assert "data: 1 of 3 answers could not be graded and count 0, most often: grading:strict: KeyError" in printed
    assert sum(json.loads(out.read_text())[0]["failures"].values()) == (3 if always else 1)


def test_several_policies_in_one_table(folder, tmp_path, capsys):
    out = tmp_path / "results.json"
    code = run(
        "eval",
        folder,
        "--data",
        "task:copy-last",
        "--limit",
        6,
        "--max-new-tokens",
        4,
        "--k",
        2,
        "--temperature",
        1,
        "--sparsity",
        "dense",
        "--sparsity",
        "streaming:6+2,window=2,sinks=1",
        "--kv-memory",
        "8MiB",
        "--out",
        out,
    )
    assert code in (0, None)
    results = json.loads(out.read_text())
    assert [r["sparsity"] for r in results] == ["dense", "streaming:6+2,window=2,sinks=1"]
    assert all(r["problems"] == 6 and r["k"] == 2 and 0 <= r["accuracy"] <= 1 for r in results)
    assert results[0]["kv"]["saved"] == 0 < results[1]["kv"]["saved"]
    shown = capsys.readouterr().out
    assert "streaming" in shown
    assert "maj@2" in shown


@pytest.mark.slow
def test_pool_and_weights_are_freed_before_the_next_model_is_loaded(folder, monkeypatch):
    """Otherwise the next pool would get only the memory that the last one left."""
    engines, held, load = [], [], Engine.load.__func__

    def loaded(cls, *arguments, **options):
        gc.collect()
        held.append((sum(cache.resident for cache, _ in engines), sum(weight() is not None for _, weight in engines)))
        engine = load(cls, *arguments, **options)
        engines.append((engine.cache, weakref.ref(next(engine.model.parameters()))))
        return engine

    monkeypatch.setattr(Engine, "load", classmethod(loaded))
    code = run(
        "eval",
        folder,
        folder,
        folder,
        "--data",
        "task:copy-last",
        "--limit",
        2,
        "--max-new-tokens",
        2,
        "--kv-memory",
        "8MiB",
    )
    assert code in (0, None)
    assert held == [(0, 0)] * 3


@pytest.mark.slow
def test_an_adapter_changes_sparse_answers_and_no_dense_ones(folder, tmp_path):
    adapter = init_adapter(LlamaForCausalLM.from_pretrained(folder), 4, 8.0, ["all"], 0)
    for _, b in adapter.weights.values():
        b.normal_(generator=torch.Generator().manual_seed(1))
    adapter.save(tmp_path / "phi")
    results = []
    for words in ((), ("--sparse-adapter", tmp_path / "phi")):
        out = tmp_path / "results.json"
        run(
            "eval",
            folder,
            "--data",
            "task:copy-last",
            "--limit",
            6,
            "--max-new-tokens",
            6,
            "--sparsity",
            "dense",
            "--sparsity",
            "streaming:6+2,window=2,sinks=1",
            "--kv-memory",
            "8MiB",
            "--out",
            out,
            *words,
        )
        results.append(json.loads(out.read_text()))
    (dense, sparse), (dense_again, adapted) = results
    assert [r["sparsity"] for r in results[1]] == ["dense", "streaming:6+2,window=2,sinks=1, with its adapter"]
    assert dense_again == dense
    assert adapted["lengths"] != sparse["lengths"]


@pytest.mark.slow
def test_models_keep_their_given_names_and_tasks_take_options(folder, tmp_path):
    """Every run exports a folder called `model`; its name alone would merge two models into one row."""
    other = tmp_path / "other" / "model"
    shutil.copytree(folder, other)
    out = tmp_path / "new" / "results.json"
    run(
        "eval",
        folder,
        other,
        "--data",
        "task:copy-last",
        "--option",
        "symbols=4",
        "--option",
        "prefix=2",
        "--limit",
        6,
        "--max-new-tokens",
        2,
        "--kv-memory",
        "8MiB",
        "--out",
        out,
    )
    assert [r["model"] for r in json.loads(out.read_text())] == [str(folder), str(other)]


@pytest.mark.slow
def test_prompt_template_for_a_file_with_other_fields(folder, tmp_path, capsys):
    data, out = tmp_path / "rows.jsonl", tmp_path / "results.json"
    data.write_text('{"question": "a b", "answer": "b"}\n')
    arguments = ("eval", folder, "--data", data, "--max-new-tokens", 2, "--kv-memory", "8MiB", "--out", out)
    assert run(*arguments) == 2
    assert "--prompt" in capsys.readouterr().err
    assert run(*arguments, "--prompt", "{question}") in (0, None)
    assert json.loads(out.read_text())[0]["problems"] == 1


@pytest.mark.slow
def test_reasoning_gym_is_graded_by_its_own_verifier(folder, tmp_path):
    pytest.importorskip("reasoning_gym")
    out = tmp_path / "results.json"
    run(
        "eval",
        folder,
        "--data",
        "reasoning-gym:chain_sum",
        "--limit",
        2,
        "--max-new-tokens",
        2,
        "--kv-memory",
        "8MiB",
        "--out",
        out,
    )
    assert list(json.loads(out.read_text())[0]["parts"]) == ["reasoning-gym:chain_sum"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "task:copy-lost"), "did you mean 'copy-last'"),
        (("--data", "task:copy-last", "--sparsity", "rvk:64"), "did you mean 'rkv'"),
        (("--data", "task:copy-last", "--k", 4), "--temperature"),
        (("--data", "task:copy-last", "--option", "symbls=4"), "did you mean 'symbols'"),
        (("--data", "task:copy-last", "--option", "symbols"), "name=value"),
    ],
)
def test_invalid_option_exits_with_2(folder, capsys, arguments, message):
    assert run("eval", folder, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_suite_evaluates_the_benchmarks_of_the_paper_with_its_samples(folder, tmp_path, capsys):
    """The seven benchmarks of arXiv 2601.10079: pass@1, and avg@32 on the two small ones."""
    fields = {"question": "a b :", "problem": "a b :", "answer": "1", "final_answer": ["1"], "solution": "\\boxed{1}"}
    samples = {
        "gsm8k": 1,
        "math500": 1,
        "gaokao2023en": 1,
        "minerva_math": 1,
        "olympiadbench": 1,
        "aime24": 32,
        "amc23": 32,
    }
    for name in samples:
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.jsonl").write_text(json.dumps(fields) + "\n")
    out = tmp_path / "results.json"
    suite = ("eval", folder, "--suite", "sparse-rl", "--data-dir", tmp_path, "--max-new-tokens", 3)
    assert run(*suite, "--out", out, "--sparsity", "rkv:8+2,window=2,sinks=1") == 0
    results = json.loads(out.read_text())
    assert {result["data"]: result["k"] for result in results} == samples
    assert sorted(results[-1]["pass_at"], key=int) == ["1", "2", "4", "8", "16", "32"]
    head = capsys.readouterr().out.splitlines()[0]
    assert "aime24 (avg@32)" in head
    assert "average" in head


def test_suites_have_the_published_settings():
    entries = {entry.data: entry for entry in list_entries([], "sparse-rl", {})}
    assert (entries["gsm8k"].temperature, entries["gsm8k"].top_p, entries["gsm8k"].max_new_tokens) == (0.8, 0.95, 8192)
    assert entries["aime24"].max_new_tokens == 16384
    assert {entry.k for entry in list_entries([], "sparse-rl", {"k": 2})} == {2}, "an option replaces the suite's value"
    sparrow = {entry.data: (entry.k, entry.temperature, entry.top_p) for entry in list_entries([], "sparrow-math", {})}
    assert sparrow == dict.fromkeys(("aime24", "aime25", "aime26"), (16, 1.0, 0.7)) | dict.fromkeys(
        ("amc22-23", "amc12-24"), (4, 1.0, 0.7)
    )
    for entries in SUITES.values():
        assert all(entry.data in BENCHMARKS for entry in entries)


def test_data_or_a_suite_is_required(folder, capsys):
    assert run("eval", folder) == 2
    assert "either --data or --suite" in capsys.readouterr().err
    assert run("eval", folder, "--data", "gsm8k", "--suite", "sparse-rl") == 2
    assert run("eval", folder, "--suite", "sparse-lr") == 2
    assert "did you mean 'sparse-rl'?" in capsys.readouterr().err


def test_an_answer_beyond_the_model_names_options_that_eval_has(folder, capsys):
    for policy in ("dense", "streaming:16+8"):
        assert run("eval", folder, "--data", "task:copy-last", "--max-new-tokens", 4000, "--sparsity", policy) == 2
        error = capsys.readouterr().err
        assert "max_new_tokens=4000" in error
        assert "max_length" not in error

"""`alula train --check`: the plan that it prints, and every invalid setting that it reports before a run."""

import json
from dataclasses import replace

import pytest

from alula.config.load import load_config
from alula.config.run import RunConfig
from alula.files import size_text
from alula.models.load import load_model
from alula.models.lora import init_adapter
from alula.trainer.check import sparsity_table, totals
from alula.trainer.memory_plan import USABLE, plan_memory
from command_line import alula, output_of


def load(recipe, *overrides) -> RunConfig:
    return load_config(recipe, overrides)


def test_check_prints_the_plan_and_loads_no_weights(recipe, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("alula.models.load.load_model", None)
    settings = (
        "model.source=shape:qwen2.5-1.5b",
        "model.dtype=bfloat16",
        "sampling.prompts=128",
        "sampling.max_new_tokens=4096",
        "data.max_prompt_tokens=512",
        "engine.max_rows=1024",
        "sparsity.evict={method: rkv, budget: 512}",
        "objective.kl=1e-4",
    )
    assert alula("train", "--check", recipe, *settings) == 0
    plan = capsys.readouterr().out
    for expected in (
        "128 prompts × 8 = 1,024",
        "1,543.7 M parameters",
        "at most 4,194,304",
        "rkv:512+128",
        "reference policy",
        "sparse-rl",
    ):
        assert expected in plan
    assert list(tmp_path.iterdir()) == [recipe], "a check leaves no run folder"


def test_check_counts_in_the_singular(tmp_path, capsys):
    ones = ["steps=1", "sampling.prompts=1", "learner.updates=1", "eval.every=1", "eval.size=1", "engine.max_rows=1"]
    assert alula("train", "--check", "toy", f"out={tmp_path / 'run'}", "data.size=2", *ones) == 0
    plan = " ".join(capsys.readouterr().out.split())
    for line in (
        "1 example of the same",
        "1 prompt × 8 = 8",
        "1 step, 8 rollouts",
        "1 rollout of 6 tokens",
        "attention sums of 1 row ",
        "every step ",
    ):
        assert line in plan


def test_check_says_how_rewards_grade_the_reference_answers(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "a b", "answer": "{answer}"}}\n' for answer in ("7", "x", "7", "x")))
    command = ["train", "--check", "toy", f"out={tmp_path / 'run'}", f"data={{source: {data}, chat: false}}"]
    command += ["eval.every=0", "sampling.prompts=1", "learner.updates=1", "model.tokenizer=task:copy-last"]
    for reward, text in (
        ("math", "mean grade of the first 3: math 0.67"),
        ("{name: format, options: {has: boxed}}", "format 0; none is accepted as it is, see docs/reward-stays-0.md"),
    ):
        assert alula(*command, f"rewards.use=[{reward}]") == 0
        assert text in " ".join(capsys.readouterr().out.split())


def test_a_private_upload_needs_an_upload(tmp_path, capsys):
    assert alula("train", "toy", f"out={tmp_path / 'run'}", "--private") == 2
    assert "--private: needs --push-to-hub" in capsys.readouterr().err


FROM_A_PRESET = ["sparsity.select={method: block-topk, budget: qwen3-4b-0.86}"]


EVICTS = ["sparsity.evict={method: rkv, budget: 64}"]


TO_A_PRESET = ["sparsity.select={method: block-topk, budget: 16384}", "distill.move.sparsity=block-topk:qwen3-4b-0.86"]


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (
            "block-topk:qwen3-8b-0.86",
            "512 to 7,168 KV tokens by length (qwen3-8b-0.86), in blocks of 16; dense layers: 2",
        ),
        ("block-topk:1k", "1,024 KV tokens, in blocks of 16; dense layers: 2"),
        ("rkv:64+16", "to 64 KV tokens whenever the cache holds 16 more"),
    ],
)
def test_check_prints_the_budgets_of_a_schedule(recipe, policy, line):
    table = sparsity_table(load(recipe, f"sparsity={policy}"))
    assert any(line in cell for cell in table.columns[1].cells)


@pytest.mark.parametrize("source", ["shape:qwen3-4b", "shape:qwen3-8b"])
@pytest.mark.parametrize("policy", [FROM_A_PRESET, TO_A_PRESET], ids=["begins with it", "moves to it"])
def test_check_warns_when_a_preset_belongs_to_another_model(recipe, capsys, monkeypatch, source, policy):
    monkeypatch.setenv("COLUMNS", "400")
    assert alula("train", "--check", recipe, f"model.source={source}", *policy) == 0
    warned = "Qwen/Qwen3-4B (hidden_size=2560, here 4096)" in capsys.readouterr().out
    assert warned is (source == "shape:qwen3-8b")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rewards.use=[mth]"], "did you mean 'math'?"),
        (["rewards.use=[{name: math, options: {boxed: true}}]"], "did you mean 'boxed_only'?"),
        (["rewards.use=['no_such_module:f']"], "module 'no_such_module'"),
        (["data={source: 'task:succesor'}"], "did you mean 'successor'?"),
        (["data={source: 'task:successor', size: 100}"], "eval.size=128"),
        (["data={source: gsm8k, data_dir: /nowhere}"], "'gsm8k'"),
        (["eval.data={source: none.jsonl}"], "'none.jsonl'"),
        (["model.source=/nowhere/Qwen2.5-1.5B-Instruct"], "model.source=shape:qwen2.5-1.5b"),
        (["model.source=/nowhere/tiny-llama"], "model.source='/nowhere/tiny-llama': "),
        (["model.source=./none.gguf"], "model.source='./none.gguf': "),
        (["model.tokenizer=/nowhere"], "model.tokenizer='/nowhere': "),
        (["model.tokenizer=task:succesor"], "did you mean 'successor'?"),
        (["rewards.use=['model:/nowhere']"], "reward model:/nowhere: "),
        (["rewards.use=['model:']"], "'model:'"),
        ([*EVICTS, "distill.adapter=/nowhere"], "distill.adapter='/nowhere': there is no adapter_config.json"),
        (
            [
                *EVICTS,
                "distill.move={sparsity: 'snapkv:8+2,window=2,sinks=1', tau: 0.5, every: 2, prompts: 24}",
                "eval.size=8",
            ],
            "distill.move: there are 8 held-out prompts",
        ),
        (
            [*EVICTS, "distill.move={sparsity: 'snapkv:8+2', tau: 0.5, every: 2, prompts: 24}"],
            "distill.move.sparsity.budget=8",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_check_reports_invalid_settings(recipe, capsys, monkeypatch, overrides, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert alula("train", "--check", recipe, *overrides) == 2
    assert message in capsys.readouterr().err


def plan_of(capsys, *arguments) -> str:
    assert alula("train", "--check", *arguments) == 0
    return capsys.readouterr().out


def test_check_measures_the_longest_prompt(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    rows = [{"prompt": " ".join("a" * n), "answer": "b"} for n in (3, 9, 200)]  # and a first token before them
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = [f"data.source={tmp_path / 'own.jsonl'}", "eval.every=0", "sampling.max_new_tokens=100"]
    known = plan_of(capsys, recipe, *data, "model.tokenizer=task:copy-last")
    assert "256 rollouts of 301 tokens, dense" in known
    assert "the longest prompt: 201 tokens" in known
    assert "in float32, as on this CPU; model.dtype=bfloat16 shows" in known
    shorter = plan_of(capsys, recipe, *data, "model.tokenizer=task:copy-last", "data.max_prompt_tokens=10")
    assert "256 rollouts of 110 tokens, dense" in shorter
    unknown = plan_of(capsys, recipe, *data, "model.dtype=bfloat16")
    assert "256 rollouts of 356 tokens, dense" in unknown
    assert "256 tokens; data.max_prompt_tokens" in unknown
    assert "as on this CPU" not in unknown


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["sampling.max_new_tokens=4091"],
            "training prompt of 6 tokens with sampling.max_new_tokens=4091 comes to 4097",
        ),
        (["eval.max_new_tokens=4096"], "held-out prompt of 6 tokens with eval.max_new_tokens=4096 "),
        (["sampling.max_new_tokens=4096", "data.source=gsm8k"], "sampling.max_new_tokens=4096: model."),
    ],
)
def test_check_rejects_sequences_longer_than_the_positions_of_the_model(recipe, capsys, overrides, message):
    plan_of(capsys, recipe, "sampling.max_new_tokens=4090")
    assert alula("train", "--check", recipe, *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "max_position_embeddings=4096" in error
    assert "engine.max_length" in error


def test_check_prints_what_is_scored(recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")

    def scoring(*overrides) -> str:
        [row] = [line for line in plan_of(capsys, recipe, *overrides).splitlines() if "scoring" in line]
        return row

    assert "every rollout" in scoring()
    skipped = scoring("objective.skip_scoring=true", "objective.kl=0.1")
    assert "only rollouts that the first optimizer step does not compute + reference (KL)" in skipped


def test_check_reports_whether_the_run_fits_into_memory(recipe):
    config = load(recipe, "sparsity=rkv:64+16", "model.dtype=bfloat16")
    plan = plan_memory(config)
    fixed = plan.weights + plan.masters + plan.moments
    counted = fixed + plan.gradients + plan.logits + plan.activations
    assert plan.learning == counted

    def last_line(free: float, config=config) -> str:
        return totals(config, plan, int(free / USABLE) + 1)[-1][0].strip()

    generating = fixed + plan.kv_sparse + plan.row_state
    assert dict(totals(config, plan, None))["total, generating"] == size_text(generating)
    assert last_line(max(counted, generating)) == "fits"
    assert last_line(counted - 1) == "does not fit: lower learner.token_budget"
    assert "use more ranks, learner.lora" in last_line(fixed)
    pool = load(recipe, "sparsity=rkv:64+16", "model.dtype=bfloat16", "engine.kv_memory=60GiB")
    assert last_line(counted, pool) == "does not fit: lower engine.kv_memory"
    crowded = replace(plan, kv_sparse=2 * counted, row_state=0, running=100)
    some = totals(config, crowded, int((fixed + counted) / USABLE) + 1)[-1][0]
    assert some.strip() == "fits 50 of the 100 rollouts at a time; the others wait"


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        ("vetoed: 0.05, on_violation: adapt", "at most 5% vetoed; on violation: adapt"),
        ("tau: 0.86", "a tail of 0.86; on violation: warn"),
        ("tau: 0.86, vetoed: 0.1", "at most 10% vetoed and a tail of 0.86; on violation: warn"),
    ],
)
def test_check_prints_the_limits_of_the_controller(recipe, capsys, monkeypatch, limits, line):
    monkeypatch.setenv("COLUMNS", "400")
    control = "control={enabled: true, " + limits + "}"
    assert line in plan_of(capsys, recipe, "sparsity=rkv:64+16", control)
    assert "controller" not in plan_of(capsys, recipe, "sparsity=rkv:64+16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["sparsity=dense", "control.vetoed=0.05"], "control.enabled=true"),
        (["sparsity=rkv:64+16"], "control.enabled=true needs control.tau"),
        (["sparsity=rkv:64+16", "control.tau=0.8", "monitor.rollouts=0"], "with monitor.rollouts=0: no tail is "),
        (["sparsity=rkv:64+16", "control.vetoed=0.05", "control.ladder=[2, 64]"], "control.ladder=[2, 64]: "),
    ],
)
def test_check_reports_invalid_settings_of_the_controller(recipe, capsys, settings, message):
    assert alula("train", "--check", recipe, "control.enabled=true", *settings) == 2
    assert message in capsys.readouterr().err


def test_check_combines_each_length_limit_with_its_prompts(recipe, tmp_path, capsys):
    """The longest training prompt is not added to the evaluation's max_new_tokens."""
    for name, length in (("train", 3000), ("held", 3)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": " ".join("a" * length), "answer": "b"}) + "\n")
    plan_of(
        capsys,
        recipe,
        f"data.source={tmp_path / 'train.jsonl'}",
        f"eval.data.source={tmp_path / 'held.jsonl'}",
        "eval.every=1",
        "eval.max_new_tokens=2000",
        "model.tokenizer=task:copy-last",
    )


def test_check_prints_once_under_torchrun(recipe, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert plan_of(capsys, recipe) == ""
    monkeypatch.setenv("RANK", "0")
    assert "what is sparse" in plan_of(capsys, recipe)


def test_check_compares_the_adapter_with_the_model(recipe, tmp_path, capsys):
    model = load_model("shape:tiny-llama").model
    init_adapter(model, rank=2, alpha=4.0, targets=["v_proj"], seed=0).save(tmp_path / "adapter")
    check = ["train", "--check", str(recipe), *EVICTS, f"distill.adapter={tmp_path / 'adapter'}"]
    assert alula(*check) == 0
    assert alula(*check, "model.source=shape:tiny-qwen3") == 2
    assert "/adapter' does not fit model.source='shape:tiny-qwen3' (" in capsys.readouterr().err


def test_check_expands_the_home_folder(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = load_model("shape:tiny-qwen3").model
    model.save_pretrained(tmp_path / "complete")
    model.config.save_pretrained(tmp_path / "no-weights")
    assert alula("train", "--check", recipe, "model.source=~/complete", "model.tokenizer=task:copy-last") == 0
    assert alula("train", "--check", recipe, "model.source=~/no-weights") == 2
    assert "model.source='~/no-weights': the folder has no .safetensors file; Alula" in capsys.readouterr().err
    model.save_pretrained(tmp_path / "no-weights" / "model")
    for source, message in (("~/no-weights", "a run's model is in "), ("no/such/folder", "no such file or folder")):
        alula("train", "--check", recipe, f"model.source={source}")
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_check_reports_an_unusable_run_folder_and_creates_none(recipe, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    held = tmp_path / "held"
    (held / "checkpoints" / "step-00000004").mkdir(parents=True)
    (held / "checkpoints" / "step-00000004" / "COMPLETE").write_text("{}")
    (held / "metrics.jsonl").write_text('{"step": 4}\n')
    before = sorted(tmp_path.rglob("*"))
    for out, more, message in (
        ("file", [], "/file: is a file"),
        ("file/run", [], "/file is a file"),
        ("held", [], "/held already contains a run; continue it with --resume"),
        ("held", ["--resume", "steps=3"], "steps=3: "),
        ("held", ["--resume"], ""),
        ("held/new/run", [], ""),
    ):
        code, printed, error = output_of(capsys, "train", "--check", recipe, f"out={tmp_path / out}", *more)
        assert code == (2 if message else 0)
        assert message in error
        assert "what is sparse" in printed, "the plan is printed too"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_check_reports_each_source_of_data_apart(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps({"prompt": f"{i} + 1 = ?", "answer": str(i + 1)}) + "\n" for i in range(300)))

    def check(*settings: str) -> str:
        reward = "rewards.use=[{name: length, options: {target: 9}}]"
        code, out, error = output_of(capsys, "train", "--check", recipe, reward, *settings)
        return error if code else " ".join(out.split())

    local, remote = f"data.source={mine}", "eval.data={source: gsm8k, split: test}"
    printed = check(local, remote)
    assert f"│ data │ {mine}: 300 examples to train on │" in printed
    assert "│ held-out data │ gsm8k (test): on the hub, not read │" in printed
    printed = check("data={source: gsm8k, split: train}", f"eval.data.source={mine}", "eval.size=64")
    assert "│ data │ gsm8k (train): on the hub, not read │" in printed
    assert f"│ held-out data │ {mine}: 64 examples to evaluate on │" in printed
    printed = check(local, "eval.size=100")
    assert f"│ data │ {mine}: 200 examples to train on │" in printed
    assert "│ held-out data │ 100 examples of the same, set aside │" in printed
    (tmp_path / "needs_a_field.py").write_text("def grade(completion, example):\n    return example['level']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert "KeyError: 'level'" in check(local, remote, "rewards.use=needs_a_field:grade"), "local data is graded"


@pytest.mark.parametrize(("section", "option"), [("data", True), ("eval.data", False)])
def test_unknown_field_names_the_setting_of_its_section(recipe, tmp_path, capsys, section, option):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"question": "a", "answer": "b"}\n' * 300)
    assert alula("train", "--check", recipe, f"{section}.source={mine}") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"alula: {section} {mine}: unknown field 'prompt' of the prompt template")
    assert f'name another with {section}.prompt="{{question}}" in a recipe' in error
    assert ("--prompt" in error) is option


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["sparsity=rkv:512+128"], "exceeds the budget (rkv:512+128"),
        (["sparsity=rkv:40+128,sinks=1,window=1"], "exceeds the budget plus buffer=128 ("),
        (["sparsity=block-topk:512"], "exceeds the budget (block-topk:512"),
        (["sparsity=rkv:40+8,sinks=1,window=1"], None),
        (["sparsity=block-topk:48"], None),
        (["sparsity=dense"], None),
    ],
)
def test_check_warns_if_nothing_will_be_sparse(recipe, capsys, monkeypatch, settings, reason):
    monkeypatch.setenv("COLUMNS", "300")
    assert alula("train", "--check", recipe, "sampling.max_new_tokens=100", *settings) == 0
    printed = capsys.readouterr().out
    assert ("Nothing will be sparse: no sequence " in printed) is (reason is not None)
    assert reason is None or reason in printed

"""A run's settings: what is read, what is refused and in which words, and that the documentation knows them all."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

import alula
from alula.cli.main import COMMANDS, app
from alula.config import docs as config_docs
from alula.config.load import all_settings, load_config, read_tree, to_yaml
from alula.config.run import RunConfig
from alula.config.settings import fields_of
from alula.errors import SettingError
from alula.files import size_text
from alula.models.load import load_model
from alula.models.lora import init_adapter
from alula.objective.settings import PRESETS, Correction
from alula.sparsity.evict import METHODS as EVICTORS
from alula.sparsity.policy import Evict, Select, Sparsity
from alula.sparsity.schedule import Schedule
from alula.sparsity.select import METHODS as SELECTORS
from alula.trainer.memory_plan import USABLE, plan_memory, totals

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SMALLEST = {
    "out": "runs/x",
    "model": {"source": "shape:tiny-llama"},
    "data": {"source": "task:copy-last"},
    "rewards": {"use": ["task:copy-last"]},
}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in SMALLEST.items() if name != "out"}))
    return path


def load(recipe, *overrides) -> RunConfig:
    return load_config(recipe, overrides)


def refusal(recipe, *overrides) -> str:
    with pytest.raises(SettingError) as refused:
        load(recipe, *overrides)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_overrides_are_yaml_and_reach_any_depth(recipe):
    config = load(
        recipe,
        "learner.lr=1e-6",
        "learner.betas=[0.9, 0.98]",
        "sparsity.evict={method: rkv, budget: 512, sinks: 0}",
        "sparsity.evict.window=16",
        "objective.correction=tis",
        "objective.correction.cap=5",
        "eval.data=null",
    )
    assert config.learner.lr == 1e-6
    assert config.learner.betas == (0.9, 0.98)
    assert config.sparsity.evict == Evict("rkv", 512, sinks=0, window=16)
    assert config.objective.correction == Correction.tis(cap=5.0)
    assert config.out == "runs/small"


def test_a_budget_is_spelt_as_on_the_command_line(recipe):
    assert load(recipe, "sparsity.evict={method: rkv, budget: 2k}").sparsity.evict == Evict("rkv", 2048)


@pytest.mark.parametrize(
    "text",
    [
        "rkv:512+128",
        "rkv:2k+64,window=16,sinks=0,mix=0.3",
        "snapkv:64+16,protect_prompt",
        "block-topk:qwen3-4b-0.86",
        "rkv:4096 & block-topk:512,block=32",
        "dense",
    ],
)
def test_a_sparsity_is_spelt_as_on_the_command_line_and_written_in_full(recipe, text):
    on_top = load(recipe, "sparsity.evict={method: random, budget: 9}", f"sparsity={text}")
    recipe.write_text(recipe.read_text() + f"sparsity: {text}\n")
    config = load(recipe)
    assert config == on_top
    assert config.sparsity == Sparsity.parse(text)
    written = yaml.safe_load(to_yaml(config))
    assert set(written["sparsity"]) == {"evict", "select"}
    assert read_tree(written) == config


def test_a_spelt_sparsity_takes_settings_on_top_and_null_is_dense(recipe):
    recipe.write_text(recipe.read_text() + "sparsity: rkv:512+128,mix=0.3\n")
    evict = load(recipe, "sparsity.evict.window=16", "sparsity.evict.options.kernel=5")
    assert evict.sparsity.evict == Evict("rkv", 512, window=16, mix=0.3, kernel=5)
    assert load(recipe, "sparsity=null").sparsity.dense
    assert "did you mean 'rkv'?" in refusal(recipe, "sparsity=rkvv:512")


def test_defaults_keep_the_dense_evaluation_on(recipe):
    config = load(recipe)
    assert config.eval.every > 0
    assert config.eval.data is None
    assert config.objective.correction == Correction.sparse_rl()
    assert config.sparsity.dense


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_itself_and_is_written_out(recipe, preset):
    config = load(recipe, f"objective.correction={preset}")
    assert config.objective.correction == PRESETS[preset]
    written = yaml.safe_load(to_yaml(config))["objective"]["correction"]
    assert written["preset"] == preset
    assert written["veto"] == PRESETS[preset].veto


def test_what_is_written_reads_back_the_same(recipe):
    config = load(
        recipe,
        "learner.lora={rank: 4}",
        "objective.correction.cap=3",
        "eval.data={source: gsm8k}",
        "sparsity.select={method: quest, budget: 64}",
        "logging.sinks=[tensorboard]",
    )
    assert read_tree(yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_replaces_all_of_another_in_a_runs_own_file(recipe, tmp_path, preset):
    """A run's config.yaml holds every setting of its preset; only what is asked for after the new one differs."""
    own = tmp_path / "config.yaml"
    own.write_text(to_yaml(load(recipe, "objective.correction={preset: sparse-rl, veto: 0.5}")))
    for name in ("objective.correction", "objective.correction.preset"):
        config = load(own, f"{name}={preset}")
        assert (config.objective.correction.preset, config.objective.correction) == (preset, PRESETS[preset])
        assert load(own, f"{name}={preset}", "objective.correction.veto=0.1").objective.correction.veto == 0.1


def test_a_budget_may_be_a_schedule(recipe):
    config = load(recipe, "sparsity.select={method: block-topk, budget: qwen3-4b-0.86}")
    select = config.sparsity.select
    assert isinstance(select, Select)
    assert select.budget.name == "qwen3-4b-0.86"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sampling.promts=3"], "'sampling.promts'; did you mean 'sampling.prompts'?"),
        (["lr=1e-5"], "did you mean 'learner.lr'?"),
        (["lerner={lr: 1}"], "did you mean 'learner'?"),
        (["rewards.use=[{nam: math}]"], "did you mean 'rewards.use.0.name'?"),
        (["sampling.n=many"], "sampling.n='many'"),
        (["sampling.n=1"], "sampling.n=1"),
        (["sampling.temperature=0"], "greater than 0"),
        (["sampling.top_p=0.9"], "which top_p cuts"),
        (["sampling.top_k=40"], "which top_k cuts"),
        (["objective.correction=sparse_rl"], "did you mean 'sparse-rl'?"),
        (["objective.correction=off"], "objective.correction.preset=False: must be"),
        (["objective.correction=null"], "objective.correction.preset=None: must be"),
        (["objective.correction=2"], "objective.correction.preset=2: must be"),
        (["objective.correction=[tis]"], "objective.correction.preset=['tis']: must be"),
        (["objective.correction.preset=no"], "objective.correction.preset=False: must be"),
        (["objective.correction.preset={cap: 2}"], "objective.correction.preset={'cap': 2}: must be"),
        (["objective.correction.capp=2"], "did you mean 'objective.correction.cap'?"),
        (["objective.correction={preset: tis, cap: -1}"], "cap=-1"),
        (["objective.correction.cap=two"], "objective.correction.cap='two'"),
        (["objective.loss=gspo"], "belongs to the whole rollout"),
        (["objective.loss=grop"], "objective.loss: unknown loss 'grop'; did you mean 'grpo'?"),
        (["objective.one_update=true", "learner.updates=4"], "set learner.updates=1"),
        (["objective.one_update=true", "objective.correction=reroll"], "one-update mode"),
        (["learner.updates=33"], "raise sampling.prompts"),
        (["learner.decay=cosine", "learner.warmup_steps=100"], "warmup_steps=100"),
        (["logging.sinks=[wandbb]"], "should be 'tensorboard', 'wandb' or 'trackio'"),
        (["rewards.correct=math"], "known: task:copy-last"),
        (["learner.lr"], "write section.setting=value"),
        (["learner.lr.x=1"], "learner.lr"),
        (["data=null"], "data"),
        (["sparsity.evict={method: rvk, budget: 64}"], "sparsity.evict: unknown evictor 'rvk'; did you mean 'rkv'?"),
        (["sparsity.evict={method: rkv, budget: 64, options: {mx: 1}}"], "did you mean 'mix'?"),
        (["sparsity.evict={method: rkv, budget: 64, mix: 1}"], "did you mean 'sparsity.evict.options.mix'?"),
        (["sparsity.evict={method: rkv, budgt: 64}"], "did you mean 'sparsity.evict.budget'?"),
        (["sparsity.budget=64"], "did you mean 'sparsity.evict.budget'?"),
        (["sparsity.evict={method: rkv, budget: 64, options: {mix: 3}}"], "sparsity.evict.options.mix=3: between 0"),
        (
            ["sparsity.evict={method: rkv, budget: 64, options: {window: 4}}"],
            "sparsity.evict.options.window=4: ",
        ),
        (["sparsity.evict={method: rkv, budget: 8}"], "sparsity.evict.budget=8 is smaller than window + sinks"),
        (["sparsity.evict={method: rkv, budget: 1.5}"], "sparsity.evict.budget=1.5: should be a number of KV"),
        (["sparsity.select={method: quest, budget: true}"], "sparsity.select.budget=True: should be a number"),
        (["sparsity.evict={method: rkv, budget: 64, buffer: 0}"], "sparsity.evict.buffer=0: "),
        (["sparsity.select={method: quest, budget: 8}"], "sparsity.select.budget=8 is smaller than the three blocks"),
        (
            ["sparsity.select={method: quest, budget: qwen3-5b}"],
            "sparsity.select.budget: unknown schedule",
        ),
        (["control={on_violation: adapt, vetoed: 0.05}"], "control.vetoed without control.enabled"),
        (["learner.learning_rate=1e-6"], "'learner.learning_rate'; here it is 'learner.lr'"),
        (["sampling.num_generations=8"], "here it is 'sampling.n'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_in_one_sentence(recipe, overrides, said):
    assert said in refusal(recipe, *overrides)


def listed(message: str) -> list[str]:
    return [] if message.endswith("there are none.") else message.partition("known: ")[2].rstrip(".").split(", ")


@pytest.mark.parametrize("method", EVICTORS)
def test_an_unknown_setting_is_answered_with_those_that_the_evictor_takes(recipe, method):
    values = {"buffer": 16, "window": 4, "sinks": 2, "protect_prompt": True, "method": method, "budget": 64}
    own = {field.name: field.default for field in fields(EVICTORS[method]) if field.name != "window"}
    section = f"sparsity.evict={{method: {method}, budget: 64"

    names = listed(refusal(recipe, f"{section}, options: {{foo: 1}}}}"))
    assert sorted(names) == sorted(own)
    for name in names:
        load(recipe, f"{section}, options: {{{name}: {own[name]}}}}}")

    names = listed(refusal(recipe, f"{section}, foo: 1}}"))
    assert len(names) == len(values | own)
    for name in names:
        load(recipe, f"{section}}}", f"{name}={(values | own)[name.split('.')[-1]]}")

    with pytest.raises(SettingError, match="unknown setting of evictor") as refused:
        Sparsity.parse(f"{method}:64,foo=1")
    names = listed(str(refused.value))
    assert sorted(names) == sorted({*values, *own} - {"method", "budget"})
    for name in names:
        Sparsity.parse(f"{method}:64,{name}={(values | own)[name]}")


@pytest.mark.parametrize("method", SELECTORS)
def test_an_unknown_setting_is_answered_with_those_that_the_selector_takes(recipe, method):
    values = {"block": 8, "dense_layers": 1, "method": method, "budget": 64}
    section = f"sparsity.select={{method: {method}, budget: 64"
    for wrong in ("foo", "window", "options"):
        names = listed(refusal(recipe, f"{section}, {wrong}: 1}}"))
        assert sorted(names) == sorted(f"sparsity.select.{name}" for name in values)
        for name in names:
            load(recipe, f"{section}}}", f"{name}={values[name.split('.')[-1]]}")


def test_values_are_taken_as_they_are_meant(recipe):
    config = load(
        recipe,
        "data.prompt={question} = ?",
        "data.answer={solution}",
        "rewards.use=math",
        "data.options=null",
        "logging.sinks=null",
        "eval.data={source: x.jsonl}",
        "eval.data.prompt={question}",
    )
    assert (config.data.prompt, config.data.answer) == ("{question} = ?", "{solution}")
    assert config.eval.data.prompt == "{question}"
    assert [term.name for term in config.rewards.use] == ["math"]
    assert (config.data.options, config.logging.sinks) == ({}, [])
    assert load(recipe, "rewards.use={name: math, weight: 2}").rewards.use[0].weight == 2
    assert 'in quotes, as prompt: "{field}"' in refusal(recipe, "data={source: x, prompt: {question}}")


def test_a_runs_folder_is_its_recipe(recipe, tmp_path):
    folder = tmp_path / "moved"
    folder.mkdir()
    with pytest.raises(SettingError, match=r"/moved': a folder without config\.yaml; name a recipe or a run's folder"):
        load_config(folder)
    (folder / "config.yaml").write_text(to_yaml(load(recipe, "steps=7", "out=runs/elsewhere")))
    config = load_config(folder, ["sampling.n=4"])
    assert (config.out, config.steps, config.sampling.n) == (str(folder), 7, 4)


def test_missing_and_unreadable_recipes(tmp_path):
    with pytest.raises(SettingError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {source: [")
    with pytest.raises(SettingError, match="not YAML"):
        load_config(broken)
    broken.write_text("- a list")
    with pytest.raises(SettingError, match="mapping"):
        load_config(broken)
    broken.write_text("model: {source: shape:tiny-llama}")
    with pytest.raises(SettingError, match="'data' is missing"):
        load_config(broken)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Schedule((512, 1024)).save("schedule.json")  # which the reader plans first
    config = load_config(path)
    assert config.eval.every > 0, "a recipe without a dense held-out evaluation"


def test_the_papers_recipes_have_the_papers_numbers():
    """papers: arXiv 2601.10079, and what its released scripts set."""
    recipes = [path for path in RECIPES if path.stem.startswith("sparse-rl-")]
    assert [path.stem for path in recipes] == [
        "sparse-rl-llama-3.2-1b",
        "sparse-rl-qwen2.5-1.5b",
        "sparse-rl-qwen2.5-3b",
        "sparse-rl-qwen2.5-7b",
    ]
    for config in map(load_config, recipes):
        s, e, o = config.sampling, config.sparsity.evict, config.objective
        assert (s.prompts, s.n, s.max_new_tokens, s.temperature) == (128, 8, 4096, 1.0)
        assert (config.learner.updates, config.steps) == (4, 100)
        assert (config.learner.lr, config.learner.betas, config.learner.weight_decay) == (1e-6, (0.9, 0.98), 0.1)
        assert config.learner.decay == "constant"
        assert (o.kl, o.loss, config.objective.clip, o.advantage) == (1e-4, "grpo", (0.2, 0.2), "grpo")
        assert config.objective.correction == Correction.sparse_rl()
        assert [(term.name, term.options) for term in config.rewards.use] == [("math", {"boxed_only": True})]
        assert config.sparsity.evict == Evict("rkv", 512, buffer=128, window=8, sinks=0)
        assert e is not None


def test_every_setting_has_a_description():
    def bare(model, path=""):
        for name, field in fields_of(model).items():
            if not field.description:
                yield path + name
            from alula.config.load import sections_in

            for section in sections_in(field.annotation):
                yield from bare(section, f"{path}{name}.")

    assert list(bare(RunConfig)) == []


def test_the_documentation_lists_every_setting_as_it_is():
    page = (ROOT / "docs" / "training.md").read_text()
    listed = page.split(config_docs.BEGIN)[1].split(config_docs.END)[0].strip()
    assert listed == config_docs.tables().strip(), "run python -m alula.config.docs docs/training.md"
    for setting in all_settings():
        assert f"`{setting}`" in listed or f"### {setting}\n" in listed


# -- the command line ---------------------------------------------------------------------------------------


def run(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "alula.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
    )


def test_help_and_settings_need_no_torch():
    code = (
        "import sys\n"
        "from alula.cli.main import app\n"
        "import alula.config.load, alula.config.settings\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_every_command_that_is_there_is_listed(capsys):
    with pytest.raises(SystemExit):
        app(["--help"])
    listed = capsys.readouterr().out
    folder = ROOT / "src" / "alula" / "cli"
    present = [
        name
        for name, (where, _) in COMMANDS.items()
        if (folder / f"{where.partition(':')[0].rpartition('.')[2]}.py").exists()
    ]
    assert {"train", "report"} <= set(present)
    assert [name for name in present if f" {name} " not in listed] == []
    helpers = {"main", "common", "options", "find_budget", "verify"}  # the last two are modes of calibrate
    files = {path.stem for path in folder.glob("[!_]*.py")} - helpers
    known = {where.partition(":")[0].rpartition(".")[2] for where, _ in COMMANDS.values()}
    assert files <= known, "a command that is in no table"


def test_the_version_is_said(capsys):
    with pytest.raises(SystemExit) as ended:
        app(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"alula {alula.__version__}\n"


def test_a_wrong_setting_is_one_sentence_and_exit_code_2(recipe, capsys):
    with pytest.raises(SystemExit) as ended:
        app(["train", str(recipe), "sampling.promts=3"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ("alula: unknown setting 'sampling.promts'; did you mean 'sampling.prompts'?\n")


def test_check_prints_the_plan_and_loads_no_weights(recipe, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("alula.models.load.load_model", None)
    with pytest.raises(SystemExit) as ended:
        app(
            [
                "train",
                "--check",
                str(recipe),
                "model.source=shape:qwen2.5-1.5b",
                "model.dtype=bfloat16",
                "sampling.prompts=128",
                "sampling.max_new_tokens=4096",
                "data.max_prompt_tokens=512",
                "engine.max_rows=1024",
                "sparsity.evict={method: rkv, budget: 512}",
                "objective.kl=1e-4",
            ]
        )
    assert not ended.value.code
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


FROM_A_PRESET = ["sparsity.select={method: block-topk, budget: qwen3-4b-0.86}"]
EVICTS = ["sparsity.evict={method: rkv, budget: 64}"]
TO_A_PRESET = ["sparsity.select={method: block-topk, budget: 16384}", "distill.move.sparsity=block-topk:qwen3-4b-0.86"]


@pytest.mark.parametrize("source", ["shape:qwen3-4b", "shape:qwen3-8b"])
@pytest.mark.parametrize("policy", [FROM_A_PRESET, TO_A_PRESET], ids=["begins with it", "moves to it"])
def test_check_says_that_a_preset_is_another_models(recipe, capsys, monkeypatch, source, policy):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as ended:
        app(["train", "--check", str(recipe), f"model.source={source}", *policy])
    assert not ended.value.code
    said = "Qwen/Qwen3-4B (hidden_size=2560, here 4096)" in capsys.readouterr().out
    assert said is (source == "shape:qwen3-8b")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rewards.use=[mth]"], "did you mean 'math'?"),
        (["rewards.use=[{name: math, options: {boxed: true}}]"], "did you mean 'boxed_only'?"),
        (["rewards.use=['no_such_module:f']"], "module 'no_such_module'"),
        (["data={source: 'task:succesor'}"], "did you mean 'successor'?"),
        (["data={source: 'task:successor', size: 100}"], "eval.size=128"),
        (["data={source: gsm8k, data_dir: /nowhere}"], "has no folder 'gsm8k'"),
        (["eval.data={source: none.jsonl}"], "'none.jsonl' does not exist"),
        (["model.source=/nowhere/Qwen2.5-1.5B-Instruct"], "model.source=shape:qwen2.5-1.5b"),
        (["model.source=/nowhere/tiny-llama"], "model.source='/nowhere/tiny-llama': no such file or folder"),
        (["model.source=./none.gguf"], "model.source='./none.gguf': no such file or folder"),
        (["model.tokenizer=/nowhere"], "model.tokenizer='/nowhere': no such folder"),
        (["model.tokenizer=task:succesor"], "did you mean 'successor'?"),
        (["rewards.use=['model:/nowhere']"], "reward model:/nowhere: no such folder"),
        (["rewards.use=['model:']"], "unknown reward 'model:'"),
        ([*EVICTS, "distill.adapter=/nowhere"], "distill.adapter='/nowhere': there is no adapter_config.json"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_check_finds_what_the_run_would_refuse(recipe, capsys, monkeypatch, overrides, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as ended:
        app(["train", "--check", str(recipe), *overrides])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def plan_of(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as ended:
        app(["train", "--check", *map(str, arguments)])
    assert not ended.value.code
    return capsys.readouterr().out


def test_check_counts_the_longest_prompt_and_adds_up(recipe, tmp_path, capsys, monkeypatch):
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
    ("overrides", "said"),
    [
        (
            ["sampling.max_new_tokens=4091"],
            "training prompt of 6 tokens with sampling.max_new_tokens=4091 comes to 4097",
        ),
        (["eval.max_new_tokens=4096"], "held-out prompt of 6 tokens with eval.max_new_tokens=4096 comes to"),
        (["sampling.max_new_tokens=4096", "data.source=gsm8k"], "sampling.max_new_tokens=4096: model."),
    ],
)
def test_check_refuses_answers_that_the_model_has_no_positions_for(recipe, capsys, overrides, said):
    plan_of(capsys, recipe, "sampling.max_new_tokens=4090")
    with pytest.raises(SystemExit) as ended:
        app(["train", "--check", str(recipe), *overrides])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert "has max_position_embeddings=4096" in error
    assert "engine.max_length" in error


def test_check_prints_what_is_scored(recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")

    def scoring(*overrides) -> str:
        [row] = [line for line in plan_of(capsys, recipe, *overrides).splitlines() if "scoring" in line]
        return row

    assert "every rollout" in scoring()
    one_update = scoring("objective.one_update=true", "learner.updates=1", "objective.kl=0.1")
    assert "only rollouts the update leaves out + reference (KL)" in one_update


def test_check_says_whether_it_fits(recipe):
    config = load(recipe, "sparsity=rkv:64+16", "model.dtype=bfloat16")
    found = plan_memory(config)
    fixed = found.weights + found.masters + found.moments
    counted = fixed + found.gradients + found.logits + found.activations
    assert found.learning == counted

    def said(free: float, config=config) -> str:
        return totals(config, found, int(free / USABLE) + 1)[-1][0].strip()

    assert dict(totals(config, found, None))["total, generating"] == size_text(fixed + found.kv_sparse)
    assert said(max(counted, fixed + found.kv_sparse)) == "fits"
    assert said(counted - 1) == "does not fit: lower learner.token_budget"
    assert "use more ranks, learner.lora" in said(fixed)
    pool = load(recipe, "sparsity=rkv:64+16", "model.dtype=bfloat16", "engine.kv_memory=60GiB")
    assert said(counted, pool) == "does not fit: lower engine.kv_memory"
    crowded = replace(found, kv_sparse=2 * counted, running=100)
    some = totals(config, crowded, int((fixed + counted) / USABLE) + 1)[-1][0]
    assert some.strip() == "fits 50 of the 100 rollouts at a time; the others wait"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("vetoed: 0.05, on_violation: adapt", "at most 5% vetoed; on violation: adapt"),
        ("tau: 0.86", "a tail of 0.86; on violation: warn"),
        ("tau: 0.86, vetoed: 0.1", "at most 10% vetoed and a tail of 0.86; on violation: warn"),
    ],
)
def test_check_says_what_the_controller_holds(recipe, capsys, monkeypatch, limits, said):
    monkeypatch.setenv("COLUMNS", "400")
    control = "control={enabled: true, " + limits + "}"
    assert said in plan_of(capsys, recipe, "sparsity=rkv:64+16", control)
    assert "controller" not in plan_of(capsys, recipe, "sparsity=rkv:64+16")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["sparsity=dense", "control.vetoed=0.05"], "control.enabled=true"),
        (["sparsity=rkv:64+16"], "control.enabled=true needs control.tau"),
        (["sparsity=rkv:64+16", "control.vetoed=0.05", "control.ladder=[2, 64]"], "control.ladder=[2, 64]: "),
    ],
)
def test_check_refuses_a_controller_that_the_run_would_refuse(recipe, capsys, settings, said):
    with pytest.raises(SystemExit) as ended:
        app(["train", "--check", str(recipe), "control.enabled=true", *settings])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_check_sets_each_answer_behind_its_own_prompts(recipe, tmp_path, capsys):
    """A long training prompt has nothing to do with the long answers of an evaluation on short ones."""
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


def test_a_budget_that_is_spelt_is_the_number_that_a_recipe_has(recipe):
    spelt, long = (
        load(recipe, s) for s in ("sparsity=rkv:64+16", "sparsity.evict={method: rkv, budget: 64, buffer: 16}")
    )
    assert to_yaml(spelt) == to_yaml(long)


def test_check_prints_once_under_torchrun(recipe, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert plan_of(capsys, recipe) == ""
    monkeypatch.setenv("RANK", "0")
    assert "what is sparse" in plan_of(capsys, recipe)


def test_check_looks_at_the_adapter_that_a_run_begins_with(recipe, tmp_path, capsys):
    model = load_model("shape:tiny-llama").model
    init_adapter(model, rank=2, alpha=4.0, targets=["v_proj"], seed=0).save(tmp_path / "adapter")
    check = ["train", "--check", str(recipe), *EVICTS, f"distill.adapter={tmp_path / 'adapter'}"]
    with pytest.raises(SystemExit) as ended:
        app(check)
    assert not ended.value.code
    with pytest.raises(SystemExit) as ended:
        app([*check, "model.source=shape:tiny-qwen3"])
    assert ended.value.code == 2
    assert "/adapter' does not fit model.source='shape:tiny-qwen3' (sparse adapter: " in capsys.readouterr().err


def test_check_finds_a_model_where_the_run_does(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = load_model("shape:tiny-qwen3").model
    model.save_pretrained(tmp_path / "whole")
    model.config.save_pretrained(tmp_path / "no-weights")
    with pytest.raises(SystemExit) as ended:
        app(["train", "--check", str(recipe), "model.source=~/whole", "model.tokenizer=task:copy-last"])
    assert not ended.value.code
    with pytest.raises(SystemExit) as ended:
        app(["train", "--check", str(recipe), "model.source=~/no-weights"])
    assert ended.value.code == 2
    assert "model.source='~/no-weights': the folder has no .safetensors file; Alula" in capsys.readouterr().err


def test_check_looks_at_the_run_folder_and_makes_none(recipe, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    held = tmp_path / "held"
    (held / "checkpoints" / "step-00000004").mkdir(parents=True)
    (held / "checkpoints" / "step-00000004" / "COMPLETE").write_text("{}")
    (held / "metrics.jsonl").write_text('{"step": 4}\n')
    before = sorted(tmp_path.rglob("*"))
    for out, more, said in (
        ("file", [], "/file: is a file"),
        ("file/run", [], "/file is a file"),
        ("held", [], "/held already contains a run; continue it with --resume"),
        ("held", ["--resume", "steps=3"], "steps=3: "),
        ("held", ["--resume"], ""),
        ("held/new/run", [], ""),
    ):
        with pytest.raises(SystemExit) as ended:
            app(["train", "--check", str(recipe), f"out={tmp_path / out}", *more])
        found = capsys.readouterr()
        assert ended.value.code == (2 if said else 0)
        assert said in found.err
        assert "what is sparse" in found.out, "the plan is shown all the same"
    assert sorted(tmp_path.rglob("*")) == before

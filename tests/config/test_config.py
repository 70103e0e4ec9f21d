"""A run's settings: recipes and overrides, messages for invalid values, and the documentation of every setting."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from alula.config import docs as config_docs
from alula.config.load import all_settings, load_config, read_tree, to_yaml
from alula.config.run import RunConfig
from alula.errors import SettingError
from alula.objective.settings import PRESETS, Correction
from alula.section import fields_of
from alula.sparsity.evict import METHODS as EVICTORS
from alula.sparsity.policy import Evict, Select, Sparsity
from alula.sparsity.select import METHODS as SELECTORS

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def load(recipe, *overrides) -> RunConfig:
    return load_config(recipe, overrides)


def error_of(recipe, *overrides) -> str:
    """The message of the error that these overrides raise: one line."""
    with pytest.raises(SettingError) as error:
        load(recipe, *overrides)
    message = str(error.value)
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
    assert load_config(recipe, "steps=7").steps == 7


def test_budgets_have_the_command_line_syntax(recipe):
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
def test_sparsity_has_the_command_line_syntax_and_is_written_in_full(recipe, text):
    on_top = load(recipe, "sparsity.evict={method: random, budget: 9}", f"sparsity={text}")
    recipe.write_text(recipe.read_text() + f"sparsity: {text}\n")
    config = load(recipe)
    assert config == on_top
    assert config.sparsity == Sparsity.parse(text)
    written = yaml.safe_load(to_yaml(config))
    assert set(written["sparsity"]) == {"evict", "select"}
    assert read_tree(written) == config


def test_overrides_of_a_sparsity_given_as_text(recipe):
    recipe.write_text(recipe.read_text() + "sparsity: rkv:512+128,mix=0.3\n")
    evict = load(recipe, "sparsity.evict.window=16", "sparsity.evict.options.kernel=5")
    assert evict.sparsity.evict == Evict("rkv", 512, window=16, mix=0.3, kernel=5)
    assert load(recipe, "sparsity=null").sparsity.dense
    assert "did you mean 'rkv'?" in error_of(recipe, "sparsity=rkvv:512")
    assert "did you mean 'rkv'?" in error_of(recipe, "sparsity=RKV:512")


def test_defaults_keep_the_dense_evaluation_on(recipe):
    config = load(recipe)
    assert config.eval.every > 0
    assert config.eval.data == []
    assert config.objective.correction == Correction.sparse_rl()
    assert config.sparsity.dense


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_load_and_are_written_out(recipe, preset):
    config = load(recipe, f"objective.correction={preset}")
    assert config.objective.correction == PRESETS[preset]
    written = yaml.safe_load(to_yaml(config))["objective"]["correction"]
    assert written["preset"] == preset
    assert written["veto"] == PRESETS[preset].veto


def test_written_config_reads_back_equal(recipe):
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
def test_preset_replaces_every_setting_of_another(recipe, tmp_path, preset):
    """A run's config.yaml holds every setting of its preset; overrides after the new preset apply on top of it."""
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(load(recipe, "objective.correction={preset: sparse-rl, veto: 0.5}")))
    for name in ("objective.correction", "objective.correction.preset"):
        config = load(written, f"{name}={preset}")
        assert (config.objective.correction.preset, config.objective.correction) == (preset, PRESETS[preset])
        assert load(written, f"{name}={preset}", "objective.correction.veto=0.1").objective.correction.veto == 0.1


def test_budget_may_be_a_schedule(recipe):
    config = load(recipe, "sparsity.select={method: block-topk, budget: qwen3-4b-0.86}")
    select = config.sparsity.select
    assert isinstance(select, Select)
    assert select.budget.name == "qwen3-4b-0.86"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.promts=3"], "'sampling.promts'; did you mean 'sampling.prompts'?"),
        (["lr=1e-5"], "did you mean 'learner.lr'?"),
        (["lerner={lr: 1}"], "did you mean 'learner'?"),
        (["rewards.use=[{nam: math}]"], "did you mean 'rewards.use.0.name'?"),
        (["sampling.n=many"], "sampling.n='many'"),
        (["sampling.n=1"], "sampling.n=1"),
        (["sampling.temperature=0"], "sampling.temperature=0: "),
        (["sampling.temperature=1e300"], "sampling.temperature=1e+300: should be less than or equal to 10000"),
        (["eval.temperature=1e-9"], "eval.temperature=1e-09: must be 0 (greedy), or at least 0.0001."),
        (["sampling.top_p=0.9"], "which top_p cuts"),
        (["sampling.top_k=40"], "which top_k cuts"),
        (["objective.correction=sparse_rl"], "did you mean 'sparse-rl'?"),
        (["objective.correction=off"], "objective.correction.preset=False: "),
        (["objective.correction=null"], "objective.correction.preset=None: "),
        (["objective.correction=2"], "objective.correction.preset=2: "),
        (["objective.correction=[tis]"], "objective.correction.preset=['tis']: "),
        (["objective.correction.preset=no"], "objective.correction.preset=False: "),
        (["objective.correction.preset={cap: 2}"], "objective.correction.preset={'cap': 2}: "),
        (["objective.correction.capp=2"], "did you mean 'objective.correction.cap'?"),
        (["objective.correction={preset: tis, cap: -1}"], "cap=-1"),
        (["objective.correction.veto=2"], "objective.correction.veto=2.0: should be below 1; a token with equal"),
        (["objective.correction.cap=two"], "objective.correction.cap='two'"),
        (["objective.loss=gspo"], "belongs to the whole rollout"),
        (["objective.loss=grop"], "objective.loss: unknown loss 'grop'; did you mean 'grpo'?"),
        (["objective.skip_scoring=true", "objective.correction=reroll"], "skip_scoring=true with reroll=true"),
        (["learner.updates=33"], "raise sampling.prompts"),
        (["learner.decay=cosine", "learner.warmup_steps=100"], "warmup_steps=100"),
        (["logging.sinks=[wandbb]"], "should be 'tensorboard', 'wandb' or 'trackio'"),
        (["rewards.correct=math"], "known: task:copy-last"),
        (["learner.lr"], "override 'learner.lr': write learner.lr=VALUE."),
        (["steps"], "override 'steps': write steps=VALUE."),
        (["engine.page=3"], "engine.page=3: use a power of two"),
        (["sparsity=block-topk:64,block=3"], "sparsity.select.block=3: use a power of two"),
        (["learner.lr.x=1"], "learner.lr"),
        (["data=null"], "data"),
        (["sparsity.evict={method: rvk, budget: 64}"], "sparsity.evict: unknown evictor 'rvk'; did you mean 'rkv'?"),
        (["sparsity.evict={method: rkv, budget: 64, options: {mx: 1}}"], "did you mean 'mix'?"),
        (["sparsity.evict={method: rkv, budget: 64, mix: 1}"], "did you mean 'sparsity.evict.options.mix'?"),
        (["sparsity.evict={method: rkv, budgt: 64}"], "did you mean 'sparsity.evict.budget'?"),
        (["sparsity.budget=64"], "did you mean 'sparsity.evict.budget'?"),
        (["sparsity.evict={method: rkv, budget: 64, options: {mix: 3}}"], "sparsity.evict.options.mix=3: "),
        (
            ["sparsity.evict={method: rkv, budget: 64, options: {window: 4}}"],
            "sparsity.evict.options.window=4: ",
        ),
        (["sparsity.evict={method: rkv, budget: 8}"], "sparsity.evict.budget=8 "),
        (["sparsity.evict={method: rkv, budget: 1.5}"], "sparsity.evict.budget=1.5: "),
        (["sparsity.select={method: quest, budget: true}"], "sparsity.select.budget=True: "),
        (["sparsity.evict={method: rkv, budget: 64, buffer: 0}"], "sparsity.evict.buffer=0: "),
        (["sparsity.select={method: quest, budget: 8}"], "sparsity.select.budget=8 "),
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
def test_invalid_settings_raise_with_one_line(recipe, overrides, message):
    assert message in error_of(recipe, *overrides)


def test_a_missing_section_names_the_setting_that_it_needs(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text("steps: 5\n")
    with pytest.raises(SettingError, match=r"'model\.source' is missing; .* model\.source=value"):
        load_config(str(path))


def listed(message: str) -> list[str]:
    return [] if message.endswith("there are none.") else message.partition("known: ")[2].rstrip(".").split(", ")


@pytest.mark.parametrize("method", EVICTORS)
def test_error_of_an_unknown_setting_lists_those_of_the_evictor(recipe, method):
    values = {"buffer": 16, "window": 4, "sinks": 2, "protect_prompt": True, "method": method, "budget": 64}
    options = {field.name: field.default for field in fields(EVICTORS[method]) if field.name != "window"}
    section = f"sparsity.evict={{method: {method}, budget: 64"

    names = listed(error_of(recipe, f"{section}, options: {{foo: 1}}}}"))
    assert sorted(names) == sorted(options)
    for name in names:
        load(recipe, f"{section}, options: {{{name}: {options[name]}}}}}")

    names = listed(error_of(recipe, f"{section}, foo: 1}}"))
    assert len(names) == len(values | options)
    for name in names:
        load(recipe, f"{section}}}", f"{name}={(values | options)[name.split('.')[-1]]}")

    with pytest.raises(SettingError, match=f"{method}.*'foo'") as error:
        Sparsity.parse(f"{method}:64,foo=1")
    names = listed(str(error.value))
    assert sorted(names) == sorted({*values, *options} - {"method", "budget"})
    for name in names:
        Sparsity.parse(f"{method}:64,{name}={(values | options)[name]}")


@pytest.mark.parametrize("method", SELECTORS)
def test_error_of_an_unknown_setting_lists_those_of_the_selector(recipe, method):
    values = {"block": 8, "dense_layers": 1, "method": method, "budget": 64}
    section = f"sparsity.select={{method: {method}, budget: 64"
    for wrong in ("foo", "window", "options"):
        names = listed(error_of(recipe, f"{section}, {wrong}: 1}}"))
        assert sorted(names) == sorted(f"sparsity.select.{name}" for name in values)
        for name in names:
            load(recipe, f"{section}}}", f"{name}={values[name.split('.')[-1]]}")


def test_templates_and_short_forms_of_values(recipe):
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
    assert config.eval.data[0].prompt == "{question}"
    assert [term.name for term in config.rewards.use] == ["math"]
    assert (config.data.options, config.logging.sinks) == ({}, [])
    assert load(recipe, "rewards.use={name: math, weight: 2}").rewards.use[0].weight == 2
    assert 'prompt: "{field}"' in error_of(recipe, "data={source: x, prompt: {question}}")
    assert "write it as {source: math500}" in error_of(recipe, "eval.data=[math500]", "eval.data.k=4")


def test_a_home_folder_and_sinks_named_twice(recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(recipe, "out=~/runs/a").out == "/home/someone/runs/a"
    assert load(recipe, "logging.sinks=[tensorboard, tensorboard]").logging.sinks == ["tensorboard"]


def test_only_answers_per_problem_that_are_asked_for_need_a_temperature(recipe):
    assert load(recipe, "eval={k: 4, temperature: 0, data: [{source: x.jsonl, k: 1}]}").eval.answers(0) == 1
    assert "k=4 with temperature=0" in error_of(recipe, "eval={k: 4, temperature: 0, data: [{source: x.jsonl}]}")


def test_run_folder_can_be_loaded_as_a_recipe(recipe, tmp_path):
    folder = tmp_path / "moved"
    folder.mkdir()
    with pytest.raises(SettingError, match=r"/moved': .*config\.yaml"):
        load_config(folder)
    (folder / "config.yaml").write_text(to_yaml(load(recipe, "steps=7", "out=runs/elsewhere")))
    config = load_config(folder, ["sampling.n=4"])
    assert (config.out, config.steps, config.sampling.n) == (str(folder), 7, 4)


def test_missing_and_unreadable_recipes(tmp_path):
    with pytest.raises(SettingError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {source: [")
    with pytest.raises(SettingError, match=r"broken\.yaml.* YAML"):
        load_config(broken)
    broken.write_text("- a list")
    with pytest.raises(SettingError, match=r"broken\.yaml.*mapping"):
        load_config(broken)
    broken.write_text("model: {source: shape:tiny-llama}")
    with pytest.raises(SettingError, match=r"'data\.source' is missing"):
        load_config(broken)


def test_every_setting_has_a_description():
    def bare(model, path=""):
        for name, field in fields_of(model).items():
            if not field.description:
                yield path + name
            from alula.config.load import sections_in

            for section in sections_in(field.annotation):
                yield from bare(section, f"{path}{name}.")

    assert list(bare(RunConfig)) == []


def test_documentation_lists_every_setting():
    page = (ROOT / "docs" / "training.md").read_text()
    listed = page.split(config_docs.BEGIN)[1].split(config_docs.END)[0].strip()
    assert listed == config_docs.tables().strip(), "run python -m alula.config.docs docs/training.md"
    for setting in all_settings():
        assert f"`{setting}`" in listed or f"### {setting}\n" in listed


def test_text_form_and_section_give_the_same_config(recipe):
    text, section = (
        load(recipe, s) for s in ("sparsity=rkv:64+16", "sparsity.evict={method: rkv, budget: 64, buffer: 16}")
    )
    assert to_yaml(text) == to_yaml(section)

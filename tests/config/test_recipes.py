"""Recipes: each passes `--check`; those of the papers have their settings and say what is published and what is not."""

import re
from pathlib import Path

import pytest

from alula.config.load import load_config
from alula.config.recipes import recipe_names, recipe_path
from alula.models.shapes import SHAPES
from alula.objective.settings import Correction
from alula.sparsity.policy import Evict, Select, Sparsity
from alula.sparsity.schedule import Schedule
from alula.trainer.memory_plan import USABLE, plan_memory
from alula.trainer.preflight import nearest_shape
from command_line import output_of

PAPERS = [name for name in recipe_names() if re.match(r"sparse-rl-|(sparrow|distill)-qwen3", name)]
NUMBERS = {"one": 1, "two": 2, "four": 4, "sixteen": 16}
GIB = 1 << 30


def shape_of(name: str) -> str:
    source = load_config(name).model.source
    return source if source.startswith("shape:") else f"shape:{nearest_shape(source)}"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_passes_the_check_with_a_bare_shape(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    code, out, error = output_of(
        capsys, "train", "--check", name, f"model.source={shape_of(name)}", "model.dtype=bfloat16"
    )
    assert code == 0, error
    assert "what is sparse" in out
    assert load_config(name).eval.every > 0, "a recipe without a dense held-out evaluation"


def test_shapes_are_the_models_of_the_recipes():
    for name in PAPERS:
        wanted = load_config(name).model.source.rpartition("/")[2].lower().removesuffix("-instruct")
        assert shape_of(name) == f"shape:{wanted}"
        assert wanted in SHAPES


@pytest.mark.parametrize("name", PAPERS)
def test_recipes_of_papers_say_what_is_published_inferred_and_needed(name):
    comment = "".join(line for line in recipe_path(name).read_text().splitlines(True) if line.startswith("#"))
    for part in ("arXiv", "# Published:", "# From the released", "# Inferred:", "# GPUs:"):
        assert part in comment
    assert max(map(len, recipe_path(name).read_text().splitlines())) <= 122


@pytest.mark.parametrize("name", PAPERS)
def test_the_stated_gpus_are_those_of_the_memory_plan(name):
    text = " ".join(recipe_path(name).read_text().replace("#", " ").split())
    config = load_config(name, [f"model.source={shape_of(name)}", "model.dtype=bfloat16"])
    stated = re.findall(r"(\w+) with (\d+) GB(?: \((\d+) GiB)?", text.partition("GPUs: ")[2])
    assert stated
    for number, size, learning in stated:
        plan = plan_memory(config, NUMBERS[number])
        assert plan.learning <= usable(size), "it does not fit"
        assert learning in ("", f"{plan.learning / GIB:.0f}")
        if NUMBERS[number] > 1:
            assert plan_memory(config, NUMBERS[number] // 2).learning > usable(size), "half as many would do"
    for alone in re.findall(r"one rank would need (\d+) GiB", text):
        assert alone == f"{plan_memory(config, 1).learning / GIB:.0f}"
    number, size, _ = stated[0]
    for answers in re.findall(r"(\d+) answers of full length at a time", text):
        plan = plan_memory(config, NUMBERS[number])
        assert int(answers) == int(plan.kv_room(usable(size)) / (plan.kv_sparse / plan.running))


def usable(size: str) -> float:
    """Memory of a GPU sold as `size` GB that a plan may use."""
    return {"80": 79, "141": 139}[size] * GIB * USABLE


def test_sparse_rl_recipes_have_the_hyperparameters_of_the_paper():
    """Source: arXiv 2601.10079 and its released scripts."""
    recipes = [name for name in PAPERS if name.startswith("sparse-rl-")]
    assert recipes == [f"sparse-rl-{model}" for model in ("llama-3.2-1b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b")]
    for config in map(load_config, recipes):
        s, o = config.sampling, config.objective
        assert (s.prompts, s.n, s.max_new_tokens, s.temperature) == (128, 8, 4096, 1.0)
        assert (config.learner.updates, config.steps) == (4, 100)
        assert (config.learner.lr, config.learner.betas, config.learner.weight_decay) == (1e-6, (0.9, 0.98), 0.1)
        assert config.learner.decay == "constant"
        assert (o.kl, o.loss, o.clip, o.advantage) == (1e-4, "grpo", (0.2, 0.2), "grpo")
        assert o.correction == Correction.sparse_rl()
        assert [(term.name, term.options) for term in config.rewards.use] == [("math", {"boxed_only": True})]
        assert config.sparsity.evict == Evict("rkv", 512, buffer=128, window=8, sinks=0)


@pytest.mark.parametrize("size", ["1.7b", "4b", "8b", "14b"])
def test_sparrow_recipes_have_the_settings_of_the_paper(size):
    """Source: arXiv 2606.08446 and its released scripts."""
    config = load_config(f"sparrow-qwen3-{size}")
    s, o = config.sampling, config.objective
    assert config.data.source == "polaris"
    assert (s.n, s.max_new_tokens, s.temperature, config.learner.updates) == (8, 37000, 1.0, 1)
    problems = config.steps * s.prompts
    assert problems == pytest.approx(33000 if size == "8b" else 53291, rel=0.002)
    assert config.sparsity == selector(f"qwen3-{size}-0.86")
    assert (config.learner.lr, o.kl, o.loss, o.clip, o.dual_clip) == (1e-6, 0, "dapo", (0.2, 0.28), 3.0)
    assert (o.correction.preset, o.correction.cap) == ("tis", 3.0)
    assert {source.source: source.k for source in config.eval.data} == {
        "aime24": 16, "aime25": 16, "aime26": 16, "amc22-23": 4, "amc12-24": 4,
    }  # fmt: skip
    assert (config.eval.temperature, config.eval.top_p, config.eval.max_new_tokens) == (1.0, 0.7, None)


def test_the_coding_recipe_has_the_settings_of_the_paper():
    config, mathematics = load_config("sparrow-qwen3-1.7b-code"), load_config("sparrow-qwen3-1.7b")
    assert (config.data.source, config.sampling.max_new_tokens, config.learner.lr) == ("taco", 24000, 5e-7)
    assert config.steps * config.sampling.prompts == pytest.approx(21000, rel=0.002)
    assert [source.source for source in config.eval.data] == ["livecodebench", "humaneval+", "mbpp+"]
    assert config.eval.size >= 1055, "all problems of every set"
    assert config.sparsity == mathematics.sparsity, "the schedule is that of mathematics"
    assert config.objective == mathematics.objective


def test_the_distillation_recipe_moves_to_the_sparser_schedule():
    config, plain = load_config("distill-qwen3-1.7b"), load_config("sparrow-qwen3-1.7b")
    assert config.distill is not None
    assert config.distill.move is not None
    assert config.sparsity == plain.sparsity
    assert Sparsity.parse(config.distill.move.sparsity) == selector("qwen3-1.7b-0.80")
    assert config.distill.move.at * config.sampling.prompts == pytest.approx(20000, rel=0.002)
    for section in ("data", "rewards", "sampling", "objective", "learner", "eval", "steps"):
        assert getattr(config, section) == getattr(plain, section)


def selector(schedule: str) -> Sparsity:
    return Sparsity(select=Select("block-topk", Schedule.load(schedule), block=16, dense_layers=2))


RECIPES_OF_PAPERS = {"Sparse-RL": "sparse-rl-qwen2.5-1.5b", "Sparrow": "sparrow-qwen3-1.7b"}


@pytest.mark.parametrize("paper", RECIPES_OF_PAPERS)
def test_the_overrides_of_the_paper_index_pass_the_check(paper, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "papers.md").read_text()
    section = page.partition(f"## {paper} (")[2].partition("\n## ")[0]
    overrides = set(re.findall(r"`((?:sparsity|objective)[\w.]*=[^`]+)`", section))
    assert overrides
    name = RECIPES_OF_PAPERS[paper]
    monkeypatch.chdir(tmp_path)
    for override in overrides:
        code, _, error = output_of(
            capsys, "train", "--check", name, f"model.source={shape_of(name)}", *override.split()
        )
        assert code == 0, error

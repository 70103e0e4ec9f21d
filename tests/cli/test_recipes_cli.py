"""Recipes by name, and shell completion."""

from pathlib import Path

import pytest

from alula.cli.main import app
from alula.config.load import load_config
from alula.config.recipes import FOLDER, recipe_names
from alula.errors import SettingError
from command_line import alula


def test_a_recipe_by_name_is_the_file_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("toy") == load_config(FOLDER / "toy.yaml")
    assert load_config("sparse-rl-qwen2.5-1.5b", ["steps=3"]).steps == 3
    with pytest.raises(SettingError, match=r"'tay'.*'toy'"):
        load_config("tay")
    with pytest.raises(SettingError, match=r"elsewhere/toy\.yaml.*alula train toy"):
        load_config("elsewhere/toy.yaml")
    Path("toy").write_text((FOLDER / "toy.yaml").read_text() + "seed: 7\n")
    assert load_config("toy").seed == 7, "a file of that name wins"


def test_recipes_are_listed_with_a_sentence_and_printed(capsys):
    alula("recipes")
    listed = capsys.readouterr().out
    assert [name for name in recipe_names() if f"\n{name} " not in f"\n{listed}"] == []
    alula("recipes", "toy")
    assert capsys.readouterr().out == (FOLDER / "toy.yaml").read_text()


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("alula tr", {"train"}, {"report"}),
        ("alula train to", {"toy", "tomorrow.yaml"}, {"start", "today.txt"}),
        ("alula train toy learner.l", {"learner.lr", "learner.lora.rank"}, {"learner.betas"}),
        ("alula train toy --ch", {"--check"}, {"--resume"}),
    ],
)
def test_completion(line, offered, not_offered, tmp_path, monkeypatch, capsys):
    for name in ("tomorrow.yaml", "today.txt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_ALULA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        app([])
    completions = set(capsys.readouterr().out.split())
    assert offered <= completions
    assert not not_offered & completions

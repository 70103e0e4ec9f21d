"""The command line: help, version, list of commands, invalid settings."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from alula import __version__
from alula.cli.main import COMMANDS
from command_line import alula

ROOT = Path(__file__).parents[2]


def test_help_and_settings_need_no_torch():
    code = (
        "import sys\n"
        "from alula.cli.main import app\n"
        "import alula.config.load, alula.settings\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_help_lists_every_command(capsys):
    alula("--help")
    listed = capsys.readouterr().out
    folder = ROOT / "src" / "alula" / "cli"
    assert {"train", "report"} <= set(COMMANDS)
    assert [name for name in COMMANDS if f" {name} " not in listed] == []
    helpers = {"main", "common", "completion", "options"}
    modes_of_calibrate = {"tails", "find_budget", "leaderboard", "verify"}
    files = {path.stem for path in folder.glob("[!_]*.py")} - helpers - modes_of_calibrate
    known = {where.partition(":")[0].rpartition(".")[2] for where, _ in COMMANDS.values()}
    assert files <= known, "a command file that COMMANDS does not list"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_fills_its_lines_and_cuts_no_word(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    alula(name, "--help")
    printed = capsys.readouterr().out
    assert "…" not in printed
    lines = [line.strip() for line in printed.partition("╭")[0].splitlines()]
    for line, following in pairwise(lines):
        word = following.partition(" ")[0]
        assert not line or not word or len(line) + 1 + len(word) > columns - 2, "a line that ends too early"


def test_version(capsys):
    assert alula("--version") == 0
    assert capsys.readouterr().out == f"alula {__version__}\n"


def test_invalid_setting_prints_one_line_and_exits_with_2(recipe, capsys):
    assert alula("train", recipe, "sampling.promts=3") == 2
    assert capsys.readouterr().err == ("alula: unknown setting 'sampling.promts'; did you mean 'sampling.prompts'?\n")


def test_env_prints_the_environment_as_json(capsys):
    alula("env")
    printed = json.loads(capsys.readouterr().out)
    assert printed["alula"] == __version__
    assert {"python", "system", "packages"} <= printed.keys()


SCRIPT = "import sys\nfrom alula.cli.main import app\nsys.exit(app())\n"
"""What pip installs as bin/alula: the folder of the script is on the path, the current folder is not."""


@pytest.mark.slow
def test_check_finds_a_reward_in_the_current_folder(tmp_path, recipe):
    script, folder = tmp_path / "bin" / "alula", tmp_path / "project"
    script.parent.mkdir()
    folder.mkdir()
    script.write_text(SCRIPT)
    (folder / "my_reward.py").write_text("def grade(completion, example):\n    return 1.0\n")

    command = [sys.executable, str(script), "train", "--check", str(recipe), "rewards.use=my_reward:grade"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

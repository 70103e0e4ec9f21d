"""The recorded environment: versions, commit, cores, command line."""

import json
import subprocess
import sys

import torch

import alula
from alula.cpus import available_cpus
from alula.run.environment import commit, environment


def test_environment_names_versions_machine_and_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/alula", "train", "a b.yaml"])
    found = environment()
    assert found["alula"] == alula.__version__
    assert found["packages"]["torch"] == torch.__version__
    assert found["command"] == "alula train 'a b.yaml'"
    monkeypatch.setattr(sys, "argv", ["/somewhere/alula/__main__.py", "env"])  # python -m alula
    assert environment()["command"] == "alula env"
    assert found["threads"] == torch.get_num_threads()
    assert found["gpus"] == [] or torch.cuda.is_available()
    assert 1 <= found["cpus"] == available_cpus()
    json.dumps(found)


def test_commit_is_that_of_the_package_not_of_a_repository_around_it(tmp_path):
    def git(*words: str) -> str:
        options = ["-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
        return subprocess.run(["git", *options, *words], capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert commit(package) is None  # no repository
    git("init", "-q")
    (tmp_path / "other").write_text("")
    git("add", "other")
    git("commit", "-qm", "other")
    assert commit(package) is None  # a copy inside a foreign repository
    git("add", "package")
    git("commit", "-qm", "package")
    assert commit(package) == git("rev-parse", "--short=12", "HEAD")
    (package / "__init__.py").write_text("changed")
    assert commit(package) == git("rev-parse", "--short=12", "HEAD") + "-dirty"

"""`alula` in this process."""

import pytest

from alula.cli.main import app


def alula(*arguments: object) -> int:
    """Run a command; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        app([*map(str, arguments)])
    return int(ended.value.code or 0)


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command; returns its exit code, standard output and standard error."""
    capsys.readouterr()
    code = alula(*arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err

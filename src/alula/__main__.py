"""`python -m alula` is `alula`."""

from alula.cli.main import app

app()

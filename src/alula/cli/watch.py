"""`alula watch`: the live view of runs, on this machine only."""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run folders to show, in this order.")],
    port: Annotated[int, typer.Option(help="Port on localhost; 0 takes a free one.")] = 8617,
) -> None:
    """Serve the report on localhost while runs go on: it updates by itself, and shows rollouts token by token."""
    from alula.report.watch import open_server

    server = open_server(runs, port)
    typer.echo(f"Open http://localhost:{server.server_port}/ in a browser on this machine; Ctrl-C ends.")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()

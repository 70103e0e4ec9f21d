"""`alula serve`: an HTTP server that clients of OpenAI and vLLM understand."""

from pathlib import Path
from typing import Annotated

import typer

from alula.cli import options as shared
from alula.cli.common import warn_other_model
from alula.cpus import set_threads
from alula.errors import SettingError, require


def serve(
    model: shared.Model,
    sparsity: shared.Sparsity = "dense",
    host: Annotated[str, typer.Option(help="Address to listen on; beyond localhost only with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="ALULA_API_KEY", help="Key that all routes but /health demand.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name for clients; by default MODEL.")] = None,
    weights_folder: Annotated[Path | None, typer.Option(help="/update_weights reads only below this folder.")] = None,
    sparse_adapter: shared.SparseAdapter = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    residual: shared.Residual = None,
    page: shared.Page = 16,
    kv_dtype: shared.KVDtype = None,
    kv_memory: shared.KVMemory = None,
    max_rows: shared.MaxRows = 256,
    max_length: Annotated[int | None, typer.Option(help="Most KV tokens of one sequence.")] = None,
    max_queue: Annotated[int, typer.Option(help="Most rollouts that run or wait at a time.")] = 4096,
    max_body: Annotated[int, typer.Option(help="Most bytes of a request's body.")] = 16 << 20,
    session_timeout: Annotated[float, typer.Option(help="Seconds after which an idle session is closed.")] = 600.0,
    drain_timeout: Annotated[int, typer.Option(help="Seconds that SIGTERM leaves to requests in progress.")] = 600,
) -> None:
    """Serve a model over HTTP, dense or under any sparsity, to clients of OpenAI and vLLM."""
    require(api_key != "", "--api-key: is empty; give a long random text, or leave it out on localhost.")
    require(
        api_key is None or (api_key == api_key.strip() and api_key.isprintable()),
        "--api-key (or ALULA_API_KEY): has a space or a line break at an end, which no client can send; remove it.",
    )
    require(0 <= port < 1 << 16, f"--port {port}: must lie between 0 and 65535.")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise SettingError("alula serve needs starlette and uvicorn; run `pip install 'alula[serve]'`.") from None
    from alula.engine.engine import Engine
    from alula.serve.server import Server, open_socket, run_until_signal
    from alula.serve.service import Service
    from alula.sparsity.policy import Sparsity

    policy = Sparsity.parse(sparsity)
    listener = open_socket(host, port, api_key)
    engine = Engine.load(
        model,
        device=device,
        dtype=dtype,
        residual=residual,
        page=policy.page(page),
        kv_dtype=kv_dtype,
        kv_memory=kv_memory,
        max_rows=max_rows,
        max_length=max_length,
        sparse_adapter=sparse_adapter,
        session_timeout=session_timeout,
        keep_prefixes=True,
    )
    set_threads(engine.model)
    warn_other_model([policy], engine)
    service = Service(
        engine,
        served_model_name or model,
        policy,
        max_body=max_body,
        max_queue=max_queue,
        weights_folder=weights_folder,
    )
    shown = f"[{host}]" if ":" in host else host
    typer.echo(
        f"Serving {service.model} ({policy.describe()}) on http://{shown}:{listener.getsockname()[1]}; Ctrl-C ends."
    )
    run_until_signal(Server(service, api_key=api_key, drain_timeout=drain_timeout), listener)

"""Runs the application on a port, and drains it on SIGTERM."""

import signal
import socket

import uvicorn

from alula.errors import SettingError, require
from alula.serve.app import LOCAL_HOSTS, build_app
from alula.serve.service import Service


class Server(uvicorn.Server):
    """On SIGTERM or Ctrl-C: accepts nothing new, finishes what runs, then ends. A second Ctrl-C ends at once."""

    def __init__(self, service: Service, *, api_key: str | None = None, drain_timeout: int = 600) -> None:
        self.service = service
        super().__init__(
            uvicorn.Config(
                build_app(service, api_key),
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=drain_timeout,
                timeout_keep_alive=75,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.draining = True
        await self.service.thread.abort_all_if_stuck()
        await super().shutdown(sockets)


def run_until_signal(server: Server, listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C; both are a normal end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises them again after it has drained
    server.run(sockets=[listener])


def open_socket(host: str, port: int, api_key: str | None) -> socket.socket:
    """A socket to listen on; beyond this machine only with a key."""
    require(
        host in LOCAL_HOSTS or bool(api_key),
        f"host={host!r}: beyond localhost the server needs --api-key (or ALULA_API_KEY).",
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise SettingError(f"port={port}: cannot listen on {host} ({error.strerror}); choose another.") from None
    # Connections inherit it. Without it an answer's body waits 40 ms for the client to acknowledge its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener

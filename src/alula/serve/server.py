"""Runs the application on a port, and drains it on SIGTERM."""

import asyncio
import logging
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn

from alula.errors import SettingError, require
from alula.serve.app import LOCAL_HOSTS, build_app
from alula.serve.service import Service

WRITE_SECONDS = 2
"""Time for the answers of rollouts that were cut off."""
LAST_STEP_SECONDS = 2.0
"""Time for the engine's step in progress at a second Ctrl-C."""


class Server(uvicorn.Server):
    """On SIGTERM or Ctrl-C: accepts nothing new, finishes what runs, then ends. What still runs after `drain_timeout`
    seconds is answered with the tokens so far. A second Ctrl-C ends at once."""

    def __init__(self, service: Service, *, api_key: str | None = None, drain_timeout: int = 600) -> None:
        self.service, self.drain_timeout = service, drain_timeout
        super().__init__(
            uvicorn.Config(
                build_app(service, api_key),
                log_level="warning",
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=drain_timeout + WRITE_SECONDS,
                timeout_keep_alive=75,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.force_exit:  # answers that it breaks off are not errors
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.draining = True
        await self.service.thread.abort_all_if_stuck()
        cut_off = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        cut_off.cancel()

    async def _cut_off(self) -> None:
        await asyncio.sleep(self.drain_timeout)
        await self.service.thread.abort_all()


def run_until_signal(server: Server, listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C; both are a normal end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises them again after it has drained
    server.run(sockets=[listener])
    if server.force_exit and not server.service.thread.end(LAST_STEP_SECONDS):
        sys.stdout.flush()
        os._exit(0)  # an interpreter that ends while a thread computes in torch crashes


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

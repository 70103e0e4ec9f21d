"""The web application: routes, keys, and errors as one sentence of JSON."""

import hmac
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alula.errors import RunFailed, SettingError
from alula.serve.answers import JSONAnswer
from alula.serve.control import Control
from alula.serve.generation import Generation
from alula.serve.metrics import Metrics
from alula.serve.service import Busy, Service, TooLarge, UnknownModel

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def build_app(service: Service, api_key: str | None = None) -> Starlette:
    """The application of a service. With a key, only `/health` answers without it."""
    control, generation = Control(service), Generation(service)
    routes = [
        Route("/health", control.health),
        Route("/v1/models", control.models),
        Route("/v1/models/{name:path}", control.model),
        Route("/metrics", control.metrics),
        Route("/inference/v1/generate", generation.tokens, methods=["POST"]),
        Route("/v1/completions", generation.completions, methods=["POST"]),
        Route("/v1/chat/completions", generation.chat, methods=["POST"]),
        Route("/pause", control.pause, methods=["POST"]),
        Route("/resume", control.resume, methods=["POST"]),
        Route("/is_paused", control.is_paused),
        Route("/abort_requests", control.abort_requests, methods=["POST"]),
        Route("/update_weights", control.update_weights, methods=["POST"]),
        Route("/weight_info", control.weight_info),
        Route("/sleep", control.sleep, methods=["POST"]),
        Route("/wake_up", control.wake_up, methods=["POST"]),
        Route("/is_sleeping", control.is_sleeping),
        Route("/sessions/{name:path}", control.close_session, methods=["DELETE"]),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.thread.start()
        yield
        await service.thread.stop()

    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(CountResponses, service.metrics, [route.path for route in routes]),
                    Middleware(RequireKey, api_key)],
        exception_handlers={
            SettingError: lambda request, error: failed(error, 400),
            UnknownModel: lambda request, error: failed(error, 404),
            TooLarge: lambda request, error: failed(error, 413),
            Busy: lambda request, error: failed(error, 503 if service.draining else 429),
            RunFailed: lambda request, error: failed(error, 500),
            ClientDisconnect: lambda request, error: Response(status_code=400),
            HTTPException: not_a_route,
            Exception: unexpected,
        },
    )  # fmt: skip


def failed(error: Exception | str, status: int) -> Response:
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    body = {"error": {"message": str(error), "type": kind, "param": None, "code": status}}
    return JSONAnswer(body, status, headers={"retry-after": "1"} if status in (429, 503) else None)


def not_a_route(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return failed(f"{request.method} {request.url.path}: {error.detail}.", error.status_code)


def unexpected(request: HTTPRequest, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    return failed(f"the server failed: {type(error).__name__}; see its log.", 500)


class RequireKey:
    """Rejects requests without the key. Without a key, rejects web pages of other hosts: a browser on this machine
    would pass their requests on."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app, self.api_key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.rejected(scope) if scope["type"] == "http" and scope["path"] != "/health" else None
        await (error or self.app)(scope, receive, send)

    def rejected(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self.api_key is None:
            hosts = [f"//{headers.get('host', '')}", headers.get("origin", "//localhost")]
            if any(host_of(url) not in LOCAL_HOSTS for url in hosts):
                return failed("a server without --api-key answers to localhost only.", 403)
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(key.encode("latin-1"), self.api_key.encode()):
            return None
        return failed("the API key is missing or wrong; send it as 'Authorization: Bearer KEY'.", 401)


def host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class CountResponses:
    """Counts answers by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: list[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, set(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self.paths else "other"
                self.metrics.responses[path, message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted)

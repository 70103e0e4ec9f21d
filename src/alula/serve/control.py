"""The routes that control a server: health, models, metrics, pause, weights, memory, sessions."""

import asyncio
import time
from typing import Any, get_args

from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response

from alula.errors import require, unknown
from alula.serve.answers import JSONAnswer
from alula.serve.bodies import AbortBody, WeightsBody
from alula.serve.engine_thread import PauseMode
from alula.serve.service import Service
from alula.serve.weights import checked_folder, read_weights


class Control:
    """Handlers of the control routes."""

    def __init__(self, service: Service) -> None:
        self.service, self.engine, self.thread = service, service.engine, service.thread
        self.started = int(time.time())

    async def health(self, request: HTTPRequest) -> Response:
        healthy = self.thread.healthy and not self.service.draining
        return Response(status_code=200 if healthy else 503)

    async def models(self, request: HTTPRequest) -> Response:
        return JSONAnswer({"object": "list", "data": [self.card()]})

    async def model(self, request: HTTPRequest) -> Response:
        self.service.check_model(request.path_params["name"])
        return JSONAnswer(self.card())

    def card(self) -> dict[str, Any]:
        return {
            "id": self.service.model,
            "object": "model",
            "created": self.started,
            "owned_by": "alula",
            "max_model_len": self.engine.max_length,
            "sparsity": self.service.sparsity.describe(),
        }

    async def metrics(self, request: HTTPRequest) -> Response:
        service, pool = self.service, self.engine.pool

        def running() -> int:
            live = {request_id for job in self.thread.jobs() for request_id in job.live}
            return sum(s.row is not None for request_id in live for s in self.engine.unfinished(request_id))

        running_now = await self.thread.call(running)
        gauges = {
            "running_rollouts": ("Rollouts that decode.", running_now),
            "waiting_rollouts": ("Rollouts that wait.", max(0, service.load - running_now)),
            "kv_pages": ("Pages of the KV pool.", pool.usable),
            "kv_pages_in_use": ("Pages that rollouts and sessions hold.", pool.in_use),
            "open_sessions": ("Sessions whose KV is kept.", len(self.engine.sessions)),
            "policy_version": ("Version of the weights.", self.engine.policy_version),
        }
        return PlainTextResponse(service.metrics.text(gauges), media_type="text/plain; version=0.0.4")

    # -- generation ---------------------------------------------------------------------------------------

    async def pause(self, request: HTTPRequest) -> Response:
        mode = query(request, "mode", get_args(PauseMode), "keep")
        await self.thread.pause(mode)  # type: ignore[arg-type]
        return JSONAnswer({"status": "paused"})

    async def resume(self, request: HTTPRequest) -> Response:
        query(request)
        await self.thread.resume()
        return JSONAnswer({"status": "running"})

    async def is_paused(self, request: HTTPRequest) -> Response:
        return JSONAnswer({"is_paused": self.engine.paused})

    async def abort_requests(self, request: HTTPRequest) -> Response:
        body = await self.service.body(request, AbortBody)
        names = set(body.request_ids)

        def abort() -> list[str]:
            jobs = [job for job in self.thread.jobs() if job.name in names]
            for job in jobs:
                self.thread.cancel(job)
            return [job.name for job in jobs]

        return JSONAnswer({"aborted": await self.thread.call(abort)})

    async def close_session(self, request: HTTPRequest) -> Response:
        name = request.path_params["name"]
        closed = await self.thread.call(lambda: self.thread.sessions.close(name))
        return JSONAnswer({"closed": closed}, status_code=200 if closed else 404)

    # -- weights and memory -------------------------------------------------------------------------------

    async def update_weights(self, request: HTTPRequest) -> Response:
        """Read weights below the server's folder. Rollouts in progress go on with the KV they have."""
        body = await self.service.body(request, WeightsBody)
        folder = checked_folder(self.service.weights_folder, body.weight_dir)
        weights = await asyncio.to_thread(read_weights, folder, self.engine)

        def update() -> int:
            self.engine.update_weights(weights, version=body.version)
            self.engine.pool.forget()  # a version number may come twice, with other weights
            self.service.weight_dir = body.weight_dir
            return self.engine.policy_version

        return JSONAnswer({"version": await self.thread.call(update), "weight_dir": body.weight_dir})

    async def weight_info(self, request: HTTPRequest) -> Response:
        return JSONAnswer({"version": self.engine.policy_version, "weight_dir": self.service.weight_dir})

    async def sleep(self, request: HTTPRequest) -> Response:
        """Release the KV pool. Weights stay (vLLM's level 1); what runs goes to host memory."""
        query(request, "level", ("1",), "1")
        await self.thread.sleep()
        return JSONAnswer({"is_sleeping": True})

    async def wake_up(self, request: HTTPRequest) -> Response:
        query(request)
        await self.thread.wake()
        return JSONAnswer({"is_sleeping": False})

    async def is_sleeping(self, request: HTTPRequest) -> Response:
        return JSONAnswer({"is_sleeping": not self.engine.cache.resident})


def query(request: HTTPRequest, name: str | None = None, known: tuple[str, ...] = (), default: str = "") -> str:
    """The value of the only query parameter that a route has; others raise."""
    for key in request.query_params:
        if key != name:
            raise unknown("query parameter", key, [name] if name else [])
    value = request.query_params.get(name, default) if name else default
    require(not known or value in known, f"{name}={value!r}: must be one of {', '.join(known)}.")
    return value

"""Environments of the `verifiers` package (0.4).

verifiers runs an episode itself: a harness sends chat completions to an OpenAI-compatible endpoint until the task is
done, then the task's rewards score it. Here Alula is that endpoint, on localhost: a request waits until the policy has
written the turn. So `reset` starts an episode and returns its first request's messages, and `step` answers a request
and returns what the next one adds, or the reward.
"""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from threading import Lock
from typing import Any

from alula.data.dataset import Messages
from alula.data.verifiers_tasks import load_env
from alula.environments.environment import Answer
from alula.errors import SettingError, require

TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""Tool calls as Hermes and Qwen models write them."""


def load_verifiers(name: str, options: Mapping[str, Any]) -> Any:
    """What builds an episode of the environment `name`; `options` are fields of its EnvConfig."""
    env = load_env(name, options, "environment.use")
    tasks = Tasks(env.taskset)
    services: dict[asyncio.AbstractEventLoop, Service] = {}
    return lambda: VerifiersEpisode(env, tasks, services)


class Tasks:
    """The tasks of a taskset by their index, read as far as needed: a taskset may have no end."""

    def __init__(self, taskset: Any) -> None:
        self._left, self._lock = iter(taskset), Lock()
        self._known: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            while len(self._known) <= index:
                task = next(self._left, None)
                require(task is not None, f"it has only {len(self._known)} tasks; set data.source to the same name.")
                self._known.append(task)
        return self._known[index]


class VerifiersEpisode:
    """One episode. Rewards come with its end: limit its turns in `environment.options` (`agent: {max_turns: 4}`) rather
    than by `environment.max_turns`, which ends an episode without asking for its reward."""

    def __init__(self, env: Any, tasks: Tasks, services: "dict[Any, Service]") -> None:
        self.env, self.tasks, self.services = env, tasks, services
        self.messages: Messages = []
        self.tools: list[dict[str, Any]] | None = None
        """The tools that the harness offers, for the chat template."""

    async def reset(self, example: dict[str, Any], seed: int) -> Messages:
        loop = asyncio.get_running_loop()
        service = self.services.get(loop)
        if service is None:
            service = self.services[loop] = Service(self.env)
        await service.start()
        require("idx" in example, "the example is not one of its tasks; set data.source to the same name.")
        self.requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.episode = asyncio.create_task(service.play(self.tasks[example["idx"]], self))
        try:
            body = await self._next()
        except asyncio.CancelledError:  # given up: nobody else knows this episode yet
            self.episode.cancel()
            raise
        if body is None:
            raise RuntimeError(f"the episode ended before its first request{self._errors()}.")
        self.messages, self.tools = body["messages"], body.get("tools")
        return [as_text(message) for message in self.messages]

    async def step(self, completion: str) -> Answer:
        self.reply.set_result(assistant_message(completion, self.tools))
        body = await self._next()
        if body is None:
            result = self.episode.result()
            require(result.ok, f"verifiers reports an error{self._errors()}.")
            return [], sum(trace.reward for trace in result.traces if trace.agent.trainable), True
        known = len(self.messages)
        require(body["messages"][:known] == self.messages, "the harness rewrote the conversation (compaction?).")
        new, self.messages = body["messages"][known + 1 :], body["messages"]
        return [as_text(message) for message in new], 0.0, False

    async def close(self) -> None:
        """Stop an episode that was ended by a limit or given up."""
        self.episode.cancel()

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Called by the endpoint: wait for the policy's turn."""
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(body)
        return await self.reply

    async def _next(self) -> dict[str, Any] | None:
        """The next request of the harness; None if the episode has ended."""
        request = asyncio.create_task(self.requests.get())
        try:
            await asyncio.wait({request, self.episode}, return_when=asyncio.FIRST_COMPLETED)
            return request.result() if request.done() else None
        finally:
            request.cancel()

    def _errors(self) -> str:
        result = self.episode.result()
        errors = [*result.errors, *(error for trace in result.traces for error in trace.errors)]
        return "".join(f"; {error.type}: {error.message}" for error in errors[:1])


class Service:
    """The endpoint and verifiers' own servers, on one event loop, until the process ends."""

    def __init__(self, env: Any) -> None:
        self.env, self.url = env, ""
        self.playing: dict[str, VerifiersEpisode] = {}
        """Episodes by the id of their trace, which every request carries."""
        self._ready: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it at the first call; further calls wait until it is ready."""
        if self._ready is None:
            self._ready = asyncio.create_task(self._start())
        await asyncio.shield(self._ready)

    async def _start(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._open = AsyncExitStack()
        await self._open.enter_async_context(self.env.serving())

    async def play(self, task: Any, episode: VerifiersEpisode) -> Any:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        minted: list[str] = []

        def on_trace(trace: Any) -> None:
            minted.append(trace.id)
            self.playing[trace.id] = episode

        client = EvalClientConfig(base_url=self.url, api_key_var="ALULA_NEEDS_NO_KEY")
        try:
            return await self.env.run_episode(task, ModelContext("alula", client), on_trace=on_trace)
        finally:
            for trace in minted:
                self.playing.pop(trace, None)

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        episode = self.playing.get(request.headers.get("X-Session-ID", ""))
        if episode is None:
            return web.json_response({"error": {"message": "this episode has ended"}}, status=404)
        body = await request.json()
        message = await episode.ask(body)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        answer = {"id": "alula", "created": int(time.time()), "model": body.get("model", "alula"), "usage": usage}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return web.json_response(answer | {"object": "chat.completion", "choices": [choice]})
        calls = [call | {"index": i} for i, call in enumerate(message.get("tool_calls", []))]
        delta = message | ({"tool_calls": calls} if calls else {})
        chunks = [{"index": 0, "delta": part, "finish_reason": end} for part, end in ((delta, None), ({}, reason))]
        events = [answer | {"object": "chat.completion.chunk", "choices": [chunk]} for chunk in chunks]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")


def assistant_message(completion: str, tools: Any) -> dict[str, Any]:
    """The policy's turn as a chat message. With tools, its tool calls are taken out of the text."""
    message: dict[str, Any] = {"role": "assistant", "content": completion}
    calls = TOOL_CALL.findall(completion) if tools else []
    if not calls:
        return message
    parsed = []
    for number, text in enumerate(calls):
        try:
            call = json.loads(text)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # not a call: the text stays
        parsed.append({"id": f"call-{number}", "type": "function", "function": function})
        message["content"] = message["content"].replace(text, "", 1)
    message["content"] = re.sub(r"<tool_call>\s*</tool_call>", "", message["content"]).strip()
    return message | ({"tool_calls": parsed} if parsed else {})


def as_text(message: dict[str, Any]) -> dict[str, str]:
    """Role and text of a message; parts that are not text raise."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        wrong = [part.get("type") for part in content if part.get("type") != "text"]
        if wrong:
            raise SettingError(f"a message holds {wrong[0]}; only text is supported.")
        content = "".join(part["text"] for part in content)
    return {"role": message["role"], "content": content}

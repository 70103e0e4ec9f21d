"""The routes that generate: vLLM's token route and OpenAI's two."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from alula.engine.rollout import Rollout, Sampling
from alula.engine.stop_strings import StopStrings
from alula.errors import RunFailed, SettingError, require
from alula.models.chat_template import apply_chat_template, check_variables
from alula.serve.answers import (
    FINISH,
    JSONAnswer,
    Names,
    Turn,
    choice_index,
    envelope,
    kv_use,
    sampled_logprobs,
    session_state,
    usage,
    with_field,
)
from alula.serve.bodies import ChatBody, CompletionBody, OpenAIFields, RequestFields, TokensBody, chat_messages
from alula.serve.engine_job import EngineJob
from alula.serve.service import Service
from alula.serve.streaming import EventStream, TextOffsets, TextStream

SESSION_HEADER = "x-session-id"


class Generation:
    """Handlers of the generation routes."""

    def __init__(self, service: Service) -> None:
        self.service, self.engine = service, service.engine

    # -- /inference/v1/generate ---------------------------------------------------------------------------

    async def tokens(self, request: HTTPRequest) -> Response:
        """Token ids in, token ids out. `logprobs` above 1 also returns that many most likely tokens."""
        body = await self.service.body(request, TokensBody)
        fields = body.sampling_params
        topk = None if fields.logprobs is None else fields.logprobs if fields.logprobs > 1 else 0
        sampling = fields.sampling(self.max_tokens(fields.max_tokens, [body.token_ids]), topk)
        job = self.job(request, body, [body.token_ids], sampling, "gen", seeded=fields.seed is not None)
        names, choices = Names(None, as_ids=True), []
        turns = await self.turns(request, job)
        for turn in turns:
            ids, values, shown = turn.token_ids, turn.logprobs or [], b"null"
            if topk is not None:
                shown = to_json(names.chat_logprobs(ids, values, turn.topk)) if topk else sampled_logprobs(ids, values)
            choice = self.choice(job, turn, sampling) | {"token_ids": ids}
            choices.append(with_field(to_json(choice), "logprobs", shown))
        answer = to_json({"request_id": job.name, "model": self.service.model, "usage": usage(turns)})
        return Response(with_field(answer, "choices", b"[%b]" % b",".join(choices)), media_type="application/json")

    # -- OpenAI's routes ----------------------------------------------------------------------------------

    async def completions(self, request: HTTPRequest) -> Response:
        body = await self.service.body(request, CompletionBody)
        tokenizer = self.tokenizer()
        given: Any = body.prompt
        require(len(given) > 0, "prompt: it is empty; give a text or token ids.")
        many = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        self.service.check_count(len(many))  # before they are tokenized
        prompts = await asyncio.to_thread(lambda: [self.engine.tokenize(prompt) for prompt in many])
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(self.max_tokens(max_tokens, prompts), body.logprobs)
        return await self.openai(request, body, prompts, sampling, Completions(body, sampling, tokenizer))

    async def chat(self, request: HTTPRequest) -> Response:
        body = await self.service.body(request, ChatBody)
        prompt = await asyncio.to_thread(self.chat_prompt, body)
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        require(body.logprobs or not body.top_logprobs, "top_logprobs: needs logprobs=true.")
        sampling = body.sampling(self.max_tokens(limit, [prompt]), (body.top_logprobs or 0) if body.logprobs else None)
        return await self.openai(request, body, [prompt], sampling, Chat(body, sampling, self.tokenizer()))

    async def openai(
        self, request: HTTPRequest, body: OpenAIFields, prompts: list[list[int]], sampling: Sampling, form: "Form"
    ) -> Response:
        seeded = body.seed is not None
        job = self.job(request, body, prompts, sampling, form.prefix, stream=bool(body.stream), seeded=seeded)
        stops = self.engine.inputs.stops(sampling)[1]
        if job.stream:
            events = self.stream(request, body, job, form, stops)
            first = await anext(events)  # an invalid request raises here, before the answer's head is sent
            return EventStream(chain(first, events))
        turns = await self.turns(request, job)
        choices = [self.choice(job, turn, sampling) | form.complete(turn, stops) for turn in turns]
        if body.return_token_ids:
            for choice, turn in zip(choices, turns):
                choice |= {"token_ids": turn.token_ids, "prompt_token_ids": prompts[turn.rollout.prompt_index]}
        return JSONAnswer(envelope(form.kind, job.name, self.service.model, choices, turns))

    async def stream(
        self, request: HTTPRequest, body: OpenAIFields, job: EngineJob, form: "Form", stops: StopStrings | None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Chunks of an answer: text and log-probs as they come, `finish_reason` and `kv` at each choice's end."""
        sampling, model = job.requests[0].sampling, self.service.model
        texts: dict[int, TextStream] = {}
        places: dict[int, TextOffsets] = {}
        turns = []
        try:
            async with aclosing(self.service.events(request, job)) as events:
                async for event in events:
                    index = choice_index(event.prompt_index, event.sample_index, sampling)
                    text = texts.get(index)
                    choice: dict[str, Any] = {"index": index, "finish_reason": None}
                    if text is None:
                        text, places[index] = TextStream(form.tokenizer, stops), TextOffsets(form.tokenizer)
                        texts[index] = text
                        for opening in form.opening():
                            yield envelope(form.chunk, job.name, model, [choice | opening], None)
                    if isinstance(event, Rollout):
                        turn = Turn.of(event)
                        turns.append(turn)
                        done = len(text.tokens)
                        ids, logprobs, topk = turn.token_ids[done:], turn.logprobs, turn.topk
                        logprobs = None if logprobs is None else logprobs[done:]
                        topk = None if topk is None else (topk[0][done:], topk[1][done:])
                        piece = text.finish(turn.text(stops, form.tokenizer))
                        choice |= self.choice(job, turn, sampling)
                    else:
                        ids, logprobs, topk = event.token_ids, event.logprobs, event.topk
                        piece = text.add(ids)
                    if piece or isinstance(event, Rollout) or form.needs_tokens:
                        choice |= form.piece(piece, ids, logprobs, topk, places[index])
                        choice |= {"token_ids": ids} if body.return_token_ids else {}
                        yield envelope(form.chunk, job.name, model, [choice], None)
        except RunFailed as error:
            if not texts:
                raise
            yield {"error": {"message": str(error), "type": "server_error", "code": 500}}
            return
        if body.stream_options and body.stream_options.include_usage:
            yield envelope(form.chunk, job.name, model, [], turns)

    # -- shared -------------------------------------------------------------------------------------------

    async def turns(self, request: HTTPRequest, job: EngineJob) -> list[Turn]:
        """All rollouts of a job, in order."""
        async with aclosing(self.service.events(request, job)) as events:
            rollouts = [event async for event in events if isinstance(event, Rollout)]
        return [Turn.of(rollout) for rollout in sorted(rollouts, key=lambda r: (r.prompt_index, r.sample_index))]

    def job(
        self,
        request: HTTPRequest,
        body: RequestFields,
        prompts: list[list[int]],
        sampling: Sampling,
        prefix: str,
        *,
        stream: bool = False,
        seeded: bool,
    ) -> EngineJob:
        """Validated work for the engine; raises for what it cannot do."""
        if body.model is not None:
            self.service.check_model(body.model)
        session = request.headers.get(SESSION_HEADER)
        if session is not None:
            require(
                0 < len(session) <= 256 and session.isascii(),
                "X-Session-ID: must have between 1 and 256 ASCII characters.",
            )
            require(
                len(prompts) == 1 and sampling.n == 1,
                "X-Session-ID: a session has one prompt and n=1; leave the header out.",
            )
        policy = body.policy(self.service.sparsity)
        requests = self.engine.requests(prompts, sampling, policy, session=session is not None)
        return EngineJob(body.request_id or f"{prefix}-{secrets.token_hex(12)}", requests, stream, session, seeded)

    def choice(self, job: EngineJob, turn: Turn, sampling: Sampling) -> dict[str, Any]:
        """What the choices of all routes have in common."""
        rollout = turn.rollout
        return {
            "index": choice_index(rollout.prompt_index, rollout.sample_index, sampling),
            "finish_reason": FINISH[rollout.finish],
            "kv": kv_use(rollout, session_state(job.session, job.continued)),
        }

    def max_tokens(self, limit: int | None, prompts: list[list[int]]) -> int:
        """The most new tokens: `limit`, or the rest of the context. An evictor's KV never grows too large for the pool,
        so the model's positions are a limit of their own. The engine rejects what it cannot hold."""
        longest, positions = max(map(len, prompts)), self.engine.positions
        require(
            longest < positions, f"the prompt has {longest} tokens, but the context ends at {positions}; shorten it."
        )
        require(
            limit is None or longest + limit <= positions,
            f"max_tokens={limit}: after a prompt of {longest} tokens it goes beyond the model's {positions} positions; "
            "lower it.",
        )
        return max(1, self.engine.max_length - longest) if limit is None else limit

    def tokenizer(self) -> Any:
        if self.engine.tokenizer is None:
            raise SettingError(f"{self.service.model} has no tokenizer; use /inference/v1/generate with token ids.")
        return self.engine.tokenizer

    def chat_prompt(self, body: ChatBody) -> list[int]:
        tokenizer = self.tokenizer()
        require(bool(tokenizer.chat_template), f"{self.service.model} has no chat template; use /v1/completions.")
        extra = body.chat_template_kwargs or {}
        check_variables(tokenizer, extra, "chat_template_kwargs")
        messages = chat_messages(body.messages)
        return list(apply_chat_template(tokenizer, messages, "messages", return_dict=False, **extra))


async def chain(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[dict[str, Any]]:
    async with aclosing(rest) as events:
        yield first
        async for event in events:
            yield event


class Form:
    """How an OpenAI route writes answers and chunks."""

    prefix: str
    kind: str
    chunk: str

    def __init__(self, body: OpenAIFields, sampling: Sampling, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.names = Names(tokenizer, bool(body.return_tokens_as_token_ids))
        self.logprobs = body.logprobs is not None and body.logprobs is not False  # type: ignore[attr-defined]
        self.needs_tokens = self.logprobs or bool(body.return_token_ids)

    def opening(self) -> list[dict[str, Any]]:
        """What comes before a choice's first text."""
        return []

    def complete(self, turn: Turn, stops: StopStrings | None) -> dict[str, Any]:
        raise NotImplementedError

    def piece(
        self, text: str, ids: list[int], logprobs: list[float] | None, topk: Any, places: TextOffsets
    ) -> dict[str, Any]:
        raise NotImplementedError


class Completions(Form):
    prefix, kind, chunk = "cmpl", "text_completion", "text_completion"

    def complete(self, turn: Turn, stops: StopStrings | None) -> dict[str, Any]:
        text, places = turn.text(stops, self.tokenizer), TextOffsets(self.tokenizer)
        return self.piece(text, turn.token_ids, turn.logprobs, turn.topk, places)

    def piece(
        self, text: str, ids: list[int], logprobs: list[float] | None, topk: Any, places: TextOffsets
    ) -> dict[str, Any]:
        shown = self.names.completion_logprobs(ids, logprobs or [], topk, places.of(ids)) if self.logprobs else None
        return {"text": text, "logprobs": shown}


class Chat(Form):
    prefix, kind, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]

    def complete(self, turn: Turn, stops: StopStrings | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": turn.text(stops, self.tokenizer)}
        return {"message": message, "logprobs": self.shown(turn.token_ids, turn.logprobs, turn.topk)}

    def piece(
        self, text: str, ids: list[int], logprobs: list[float] | None, topk: Any, places: TextOffsets
    ) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}, "logprobs": self.shown(ids, logprobs, topk)}

    def shown(self, ids: list[int], logprobs: list[float] | None, topk: Any) -> dict[str, Any] | None:
        return self.names.chat_logprobs(ids, logprobs or [], topk) if self.logprobs else None

"""Request bodies: the fields that each route accepts. An error names the field."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from alula.engine.rollout import Sampling
from alula.errors import SettingError, require, unknown
from alula.settings import Seed
from alula.sparsity.policy import DENSE, Sparsity
from alula.sparsity.schedule import PRESETS
from alula.sparsity.text import settings_of

B = TypeVar("B", bound="Body")
MOST = (1 << 31) - 1
Count = Annotated[int, Field(ge=1, le=MOST)]
Zero = Literal[0] | Literal[0.0] | None  # type: ignore[valid-type]
One = Literal[1] | Literal[1.0] | None  # type: ignore[valid-type]
Unsupported: TypeAlias = None
"""The type of a field that must be left out, or null."""
Stops = Annotated[
    str | Annotated[list[str], Field(max_length=16)] | None, Field(description="must be a text or up to 16 texts")
]
Prompts = Annotated[
    str | list[str] | list[int] | list[list[int]],
    Field(description="must be a text, a list of token ids, or a list of either"),
]
MOST_LOGPROBS = 20
NO_TOOLS = (
    "tool calls are not supported here; render tools and parse calls in the client, with /inference/v1/generate or "
    "/v1/completions"
)
TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
"""Fields of a message, beside role and content, that chat templates read."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SamplingFields(Body):
    """Sampling settings that all routes share. Fields with a single value exist for clients that send defaults."""

    max_tokens: Count | None = None
    min_tokens: int | None = Field(0, ge=0, le=MOST)
    n: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, le=MOST)
    seed: Seed | None = None
    stop: Stops = None
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    ignore_eos: bool | None = False
    min_p: Zero = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    repetition_penalty: One = None
    logit_bias: dict[str, Unsupported] | None = None
    include_stop_str_in_output: Literal[False] = False

    def sampling(self, max_tokens: int, topk: int | None) -> Sampling:
        """`topk` is the number of alternatives with their log-probs; None if no log-probs are wanted."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        sampling = Sampling(
            n=1 if self.n is None else self.n,
            max_new_tokens=max_tokens,
            min_new_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=secrets.randbits(62) if self.seed is None else self.seed,
            stop=(*stop, *(self.stop_token_ids or ())),
            ignore_eos=bool(self.ignore_eos),
            topk_logprobs=topk or 0,
        )
        require(
            topk is None or not sampling.filtered,
            f"logprobs with top_p={sampling.top_p}, top_k={sampling.top_k}: tokens of a filtered distribution have no "
            "log-prob under the policy; leave out logprobs, or top_p and top_k.",
        )
        return sampling


class RequestFields(Body):
    """Fields that all generation routes share."""

    model: str | None = None
    request_id: str | None = Field(None, max_length=256)
    priority: Literal[0] | None = None
    sparsity: str | None = Field(None, max_length=256)
    cache_salt: Unsupported = None

    def policy(self, default: Sparsity) -> Sparsity:
        return default if self.sparsity is None else parse_policy(self.sparsity)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class OpenAIFields(SamplingFields, RequestFields):
    """Fields of both OpenAI routes."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    skip_special_tokens: Literal[True] = True
    user: str | None = None


class CompletionBody(OpenAIFields):
    """`POST /v1/completions`."""

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: Literal[False] | None = False
    best_of: Literal[1] | None = None
    suffix: Unsupported = None


class ChatBody(OpenAIFields):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] = True
    tools: Unsupported = Field(None, description=NO_TOOLS)
    tool_choice: Literal["none", "auto"] | None = Field(None, description=NO_TOOLS)
    parallel_tool_calls: bool | None = None
    functions: Unsupported = Field(None, description=NO_TOOLS)
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None


class TokenSampling(SamplingFields):
    """`sampling_params` of `POST /inference/v1/generate`."""

    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    skip_special_tokens: bool = True
    """Without effect, like the next two: the answer is token ids, and the chosen experts are not returned."""
    detokenize: bool = False
    routed_experts_prompt_start: int | None = None


class TokensBody(RequestFields):
    """`POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: TokenSampling = Field(default_factory=lambda: TokenSampling.model_validate({}))
    stream: Literal[False] | None = False
    features: Unsupported = None


class AbortBody(Body):
    """`POST /abort_requests`."""

    request_ids: list[str] = Field(max_length=100_000)


class WeightsBody(Body):
    """`POST /update_weights`."""

    weight_dir: str = Field(max_length=4096)
    version: int | None = None


def parse_body(kind: type[B], body: bytes) -> B:
    """A validated body; raises `SettingError` with one sentence that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise SettingError(explain(kind, error)) from None


def explain(kind: type[BaseModel], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']}."
    if not first["loc"]:
        return "the body must be a JSON object."
    owner, path = kind, []
    for key in first["loc"]:
        path.append(str(key))
        info = owner.model_fields.get(str(key))
        if info is None:
            break
        if info.description and first["type"] != "missing":
            return f"{'.'.join(path)}: {info.description}."
        models = [t for t in (info.annotation, *get_args(info.annotation)) if is_model(t)]
        if not models:
            break
        owner = models[0]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        return str(unknown("field", name, owner.model_fields))
    if first["type"] == "missing":
        return f"{name}: this field is required."
    value = repr(first["input"])
    shown = value if len(value) <= 40 else f"{value[:40]}..."
    if first["type"] in ("literal_error", "none_required"):
        return f"{name}={shown}: not supported by this server; leave it out."
    return f"{name}={shown}: {first['msg'][0].lower()}{first['msg'][1:]}."


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def parse_policy(text: str) -> Sparsity:
    """A policy that a client names. Schedules come from presets only: a client must not read the server's files."""
    if text.strip() == "dense":
        return DENSE
    presets = {path.stem for path in PRESETS.glob("*.json")}
    for settings in settings_of(text):
        budget = str((settings or {}).get("budget", "0"))
        require(
            budget.removesuffix("k").isdigit() or (budget in presets and not Path(budget).exists()),
            f"sparsity={text!r}: a budget is a number of tokens or one of the presets {', '.join(sorted(presets))}.",
        )
    return Sparsity.parse(text)


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their text parts joined, and the other fields that templates read."""
    result = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        require(isinstance(role, str), f"messages[{index}].role={role!r}: must be a text such as 'user'.")
        for name, value in message.items():
            if name in ("role", "content") or value in (None, [], {}):  # clients send answers back with empty fields
                continue
            field = f"messages[{index}].{name}"
            require(name not in ("tool_calls", "function_call"), f"{field}: {NO_TOOLS}.")
            require(name in TEXT_FIELDS, f"{field}: not supported by this server; leave it out.")
            require(isinstance(value, str), f"{field}={value!r:.40}: must be a text.")
        if isinstance(content, list):
            for part in content:
                require(
                    isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str),
                    f"messages[{index}].content: only parts such as {{'type': 'text', 'text': '...'}} are supported.",
                )
            content = "".join(part["text"] for part in content)
        require(isinstance(content, str), f"messages[{index}].content={content!r:.40}: must be a text.")
        result.append({"role": role, "content": content} | {n: message[n] for n in TEXT_FIELDS if message.get(n)})
    return result

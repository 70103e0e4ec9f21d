"""A real server on a free port, in a thread of the test's process, with a tiny model that reads bytes."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from alula.data.load_tokenizer import attach_tokenizer
from alula.engine.engine import Engine
from alula.models.load import LoadedModel, load_model
from alula.serve.server import Server, open_socket
from alula.serve.service import Service

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if shout %}!{% endif %}{% endif %}"
)


def byte_tokenizer(special: tuple[str, ...] = SPECIAL) -> PreTrainedTokenizerFast:
    """One token per byte, and a chat template. The first special token ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0])
    fast.add_special_tokens({"additional_special_tokens": list(special[1:])})
    fast.chat_template = TEMPLATE
    return fast


def byte_model(seed: int = 0, tokenizer: PreTrainedTokenizerFast | None = None) -> LoadedModel:
    loaded = load_model("shape:tiny-llama", seed=seed)
    torch.manual_seed(seed)
    tokenizer = tokenizer or byte_tokenizer()
    loaded.model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return replace(attach_tokenizer(loaded, tokenizer, resize=True), name="tiny")


@contextmanager
def served(
    loaded: LoadedModel | None = None, *, api_key: str | None = None, engine_options: dict | None = None, **options
) -> Iterator[tuple[str, Service]]:
    """The address of a server, and its service."""
    engine_options = {"page": 4, "kv_memory": "4MiB", "max_rows": 16, "max_length": 2048, "keep_prefixes": True} | (
        engine_options or {}
    )
    engine = Engine(loaded or byte_model(), **engine_options)
    service = Service(engine, "tiny", **options)
    server = Server(service, api_key=api_key, drain_timeout=30)
    listener = open_socket("127.0.0.1", 0, api_key)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join(40)
        assert not thread.is_alive()


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)

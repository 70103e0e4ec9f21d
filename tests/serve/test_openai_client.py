"""The OpenAI package against a real server: completions, chat, streaming, log-probs, stops."""

import math

import openai
import pytest

from alula import Sampling, Sparsity
from served import byte_model, served

PROMPT = "The quick brown fox"
POLICY = "rkv:12+4,window=3,sinks=2"


@pytest.fixture(scope="module")
def server():
    with served() as (address, service):
        yield address, service


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def reference():
    """The same engine, used in this process."""
    from alula import Engine

    return Engine(byte_model(), page=4, kv_memory="4MiB", max_rows=16)


def test_models(client):
    (card,) = client.models.list().data
    assert (card.id, card.max_model_len, card.sparsity) == ("tiny", 2048, "dense")
    assert card.created > 0
    assert client.models.retrieve("tiny") == card
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny' only"):
        client.models.retrieve("other")


@pytest.mark.parametrize("policy", [None, POLICY])
def test_completions_equal_the_engine(client, reference, policy):
    prompts = [PROMPT, "Etaoin shrdlu"]
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=24, seed=5, logprobs=2, extra_body={"sparsity": policy}
    )
    sampling = Sampling(n=2, max_new_tokens=24, seed=5, topk_logprobs=2)
    expected = reference.generate(prompts, sampling, Sparsity.parse(policy) if policy else None)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, rollout in zip(answer.choices, expected):
        assert choice.text == rollout.text
        assert choice.finish_reason == rollout.finish
        assert choice.logprobs.token_logprobs == pytest.approx(rollout.logprobs.tolist(), abs=1e-5)
        for name, logprob, top in zip(
            choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        ):
            assert len(top) in (2, 3), "the sampled token may be none of the two most likely"
            assert top[name] == pytest.approx(logprob, abs=1e-4)
        assert choice.kv["sparsity"] == (policy or "dense")
        assert choice.kv["evictions"] == rollout.kv.evictions
        assert choice.kv["peak_tokens"] == rollout.kv.peak_tokens
    assert answer.usage.completion_tokens == sum(map(len, expected))
    assert answer.usage.prompt_tokens == sum(len(reference.tokenize(prompt)) for prompt in prompts)


@pytest.mark.parametrize("stop", [None, ["n", "qu"], "\n"])
@pytest.mark.parametrize("policy", [None, POLICY])
def test_streams_equal_complete_answers(client, policy, stop):
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "n": 3,
        "max_tokens": 60,
        "seed": 2,
        "logprobs": 2,
        "stop": stop,
        "extra_body": {"sparsity": policy},
    }
    complete = client.completions.create(**body)
    top, offsets = [[], [], []], [[], [], []]
    texts, logprobs, tokens, finish, kv = [""] * 3, [[], [], []], [[], [], []], [None] * 3, [None] * 3
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        logprobs[choice.index] += choice.logprobs.token_logprobs
        tokens[choice.index] += choice.logprobs.tokens
        offsets[choice.index] += choice.logprobs.text_offset
        top[choice.index] += [list(entry) for entry in choice.logprobs.top_logprobs]
        finish[choice.index] = choice.finish_reason or finish[choice.index]
        kv[choice.index] = getattr(choice, "kv", None) or kv[choice.index]
    assert texts == [choice.text for choice in complete.choices]
    assert finish == [choice.finish_reason for choice in complete.choices]
    assert tokens == [choice.logprobs.tokens for choice in complete.choices]
    assert offsets == [choice.logprobs.text_offset for choice in complete.choices]
    assert top == [[list(entry) for entry in choice.logprobs.top_logprobs] for choice in complete.choices]
    for streamed, choice in zip(logprobs, complete.choices):
        assert streamed == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
    assert [use["evictions"] for use in kv] == [choice.kv["evictions"] for choice in complete.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == complete.usage.completion_tokens
    assert len(chunks) > 30 or stop
    if stop:
        assert not any(text in answer for answer in texts for text in ([stop] if isinstance(stop, str) else stop))


def test_chat(client, reference):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_completion_tokens=20,
        seed=1,
        logprobs=True,
        top_logprobs=3,
        extra_body={"return_token_ids": True, "chat_template_kwargs": {"shout": True, "name": "unused"}},
    )
    (choice,) = answer.choices
    (rollout,) = reference.generate(["<|user|>Hello<|end|><|assistant|>!"], Sampling(max_new_tokens=20, seed=1))
    assert choice.token_ids == rollout.token_ids
    assert choice.prompt_token_ids == rollout.prompt_ids
    assert choice.message.content == rollout.text
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(rollout.logprobs.tolist(), abs=1e-5)
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) < 1
    streamed = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=20, seed=1, stream=True
    )
    chunks = [chunk.choices[0] for chunk in streamed]
    assert chunks[0].delta.role == "assistant"
    (plain,) = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=20, seed=1
    ).choices
    assert "".join(chunk.delta.content or "" for chunk in chunks) == plain.message.content
    assert chunks[-1].finish_reason == plain.finish_reason


def test_an_answer_goes_back_as_it_came(client):
    """Clients append the answer's own message, with all its empty fields, to the history."""
    messages = [{"role": "user", "content": "Hello"}]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, seed=1)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=5).usage.completion_tokens > 0


def test_log_probs_name_tokens_by_id(client):
    (choice,) = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=5,
        logprobs=True,
        extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True},
    ).choices
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{token}" for token in choice.token_ids]


def test_without_a_seed_answers_differ(client):
    texts = {client.completions.create(model="tiny", prompt="a", max_tokens=12).choices[0].text for _ in range(4)}
    assert len(texts) == 4


def test_stop_token_ids_and_ignore_eos(client):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "seed": 3}
    free = client.completions.create(**body, extra_body={"ignore_eos": True, "return_token_ids": True}).choices[0]
    assert free.finish_reason == "length"
    stop = free.token_ids[7]
    cut = client.completions.create(
        **body, extra_body={"ignore_eos": True, "return_token_ids": True, "stop_token_ids": [stop]}
    ).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_errors_are_the_clients(client):
    with pytest.raises(openai.NotFoundError, match="model='other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match=r"logprobs with top_p=0.9"):
        client.completions.create(model="tiny", prompt="a", top_p=0.9, logprobs=1)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )

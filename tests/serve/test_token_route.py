"""vLLM's token route, and sessions over HTTP."""

import httpx
import pytest
from pydantic_core import to_json

from alula import Engine, Sampling, Sparsity
from alula.serve.answers import Names, sampled_logprobs
from served import byte_model, served, wait_until

PROMPT = [5, 9, 14, 22, 31, 8, 9, 77, 13]
POLICY = "rkv:12+4,window=3,sinks=2"


@pytest.fixture(scope="module")
def server():
    with served() as (address, service):
        yield address, service


@pytest.fixture
def post(server):
    with httpx.Client(base_url=server[0], timeout=60) as client:

        def post(token_ids, sampling_params=None, session=None, **body):
            headers = {"X-Session-ID": session} if session else {}
            body = {"model": "tiny", "token_ids": token_ids, "sampling_params": sampling_params or {}} | body
            answer = client.post("/inference/v1/generate", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield post


def reference():
    return Engine(byte_model(), page=4, kv_memory="4MiB", max_rows=16)


@pytest.mark.parametrize("policy", ["dense", POLICY])
def test_token_ids_and_log_probs_equal_the_engine(post, policy):
    params = {"max_tokens": 20, "n": 2, "seed": 3, "logprobs": 1, "temperature": 0.8, "ignore_eos": True}
    answer = post(PROMPT, params, sparsity=policy, request_id="mine")
    sampling = Sampling(n=2, max_new_tokens=20, seed=3, temperature=0.8, ignore_eos=True)
    expected = reference().generate([PROMPT], sampling, Sparsity.parse(policy))
    assert answer["request_id"] == "mine"
    for choice, rollout in zip(answer["choices"], expected):
        assert choice["token_ids"] == rollout.token_ids
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in rollout.token_ids]
        assert [entry["logprob"] for entry in content] == pytest.approx(rollout.logprobs.tolist(), abs=1e-5)
        assert choice["kv"]["peak_tokens"] == rollout.kv.peak_tokens
        assert "session" not in choice["kv"]
    assert answer["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("count", [0, 1, 3])
def test_log_probs_without_objects_are_the_same_json(count):
    ids, logprobs = [3, 151_935, 0][:count], [-0.10000000149011612, float("nan"), -1e-9][:count]
    assert sampled_logprobs(ids, logprobs) == to_json(Names(None, as_ids=True).chat_logprobs(ids, logprobs, None))


def test_without_max_tokens_the_context_is_the_limit(post, server):
    service = server[1]
    (choice,) = post([7] * 2000, {"ignore_eos": True})["choices"]
    assert len(choice["token_ids"]) == service.engine.max_length - 2000


def play(post, name, policy, turns, given):
    """Turns of a session: each sends the whole history, and adds given tokens."""
    history, answers = list(PROMPT), []
    for turn in range(turns):
        params = {"max_tokens": 11, "seed": 4, "logprobs": 1, "ignore_eos": True}
        answer = post(history, params, session=name, sparsity=policy)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert turn == 0 or cached == len(history) - len(given[turn - 1])
        answers.append(answer["choices"][0])
        history = history + answers[-1]["token_ids"] + given[turn]
    return answers


@pytest.mark.parametrize("policy", ["dense", POLICY])
def test_a_session_continues_what_it_kept(post, server, policy):
    """Equal to the engine's own sessions: tokens, log-probs, and the KV use, which counts all turns."""
    given = [[40, 41, 42], [50, 51, 52, 53, 54], [7]]
    answers = play(post, f"s {policy[:3]}", policy, 3, given)
    engine = reference()
    sampling = Sampling(max_new_tokens=11, seed=4, ignore_eos=True)
    (request,) = engine.requests([PROMPT], sampling, Sparsity.parse(policy), session=True)
    engine.submit(request)
    for turn, answer in enumerate(answers):
        (rollout,) = engine.drain()
        start = len(rollout) - 11
        assert answer["token_ids"] == rollout.token_ids[start:]
        logprobs = [entry["logprob"] for entry in answer["logprobs"]["content"]]
        assert logprobs == pytest.approx(rollout.logprobs[start:].tolist(), abs=1e-5)
        assert answer["kv"]["session"] == ("continued" if turn else "new")
        assert answer["kv"]["evictions"] == rollout.kv.evictions
        assert answer["kv"]["given_tokens"] == rollout.kv.given_tokens
        engine.extend(rollout.session, given[turn])
    assert policy == "dense" or answers[-1]["kv"]["evictions"] > 1


def test_what_does_not_extend_a_session_starts_anew(post, server):
    engine = server[1].engine
    first, second = play(post, "s", POLICY, 2, [[40], []])
    history = PROMPT + first["token_ids"] + [40] + second["token_ids"]

    def state(tokens, **body):
        return post(tokens, {"max_tokens": 3} | body.pop("params", {}), session="s", **body)["choices"][0]["kv"]

    changed = [*history[:-1], (history[-1] + 1) % 256, 9]
    assert state(changed, sparsity=POLICY)["session"] == "new"  # another token in the middle
    assert state(history, sparsity=POLICY)["session"] == "new"  # another history than the one kept last
    assert state([*history, 9], sparsity=POLICY)["session"] == "new"  # its answer is missing
    before = len(engine.sessions)
    kept = [*history, 9]
    answer = post(kept, {"max_tokens": 3}, session="t", sparsity=POLICY)["choices"][0]
    kept += answer["token_ids"]
    assert len(engine.sessions) == before + 1
    policies = [POLICY, "dense"]
    for policy, expected in zip(policies, ["continued", "new"]):
        answer = post([*kept, 8], {"max_tokens": 3}, session="t", sparsity=policy)["choices"][0]
        assert answer["kv"]["session"] == expected
        kept = [*kept, 8, *answer["token_ids"]]
    answer = post([*kept, 8], {"max_tokens": 3, "top_p": 0.5}, session="t", sparsity="dense")["choices"][0]
    assert answer["kv"]["session"] == "new"
    assert len(engine.sessions) == before + 1, "what is replaced is closed"


def test_a_session_keeps_its_seed(post, server):
    kept = [5, 6]
    for seed, expected in ((1, "new"), (2, "new"), (2, "continued"), (None, "continued")):
        params = {"max_tokens": 3, "ignore_eos": True} | ({} if seed is None else {"seed": seed})
        (choice,) = post(kept, params, session="seeds")["choices"]
        assert choice["kv"]["session"] == expected
        if seed is not None:
            assert choice["token_ids"] == post(kept, params)["choices"][0]["token_ids"]
        kept = [*kept, *choice["token_ids"], 8]


def test_sessions_are_closed_by_clients_and_by_time(server, post):
    address, service = server
    engine = service.engine
    for name in list(service.thread.sessions._kept):
        assert httpx.delete(f"{address}/sessions/{name}").json() == {"closed": True}
    assert httpx.delete(f"{address}/sessions/never").status_code == 404
    post(PROMPT, {"max_tokens": 3}, session="run/7")
    assert httpx.delete(f"{address}/sessions/run%2F7").json() == {"closed": True}
    wait_until(lambda: engine.pool.in_use == 0)
    post(PROMPT, {"max_tokens": 3}, session="u")
    assert engine.pool.in_use > 0
    engine.session_timeout = -1.0
    try:
        post(PROMPT, {"max_tokens": 3})
        wait_until(lambda: not engine.sessions and not service.thread.sessions._kept)
    finally:
        engine.session_timeout = 600.0
    assert engine.pool.in_use == 0


def test_a_turn_that_cannot_fit_leaves_the_session_open(server, post):
    first = post(PROMPT, {"max_tokens": 3}, session="v")["choices"][0]
    history = PROMPT + first["token_ids"]
    body = {"token_ids": [*history, 8], "sampling_params": {"max_tokens": 3000}}
    answer = httpx.post(f"{server[0]}/inference/v1/generate", json=body, headers={"X-Session-ID": "v"})
    assert answer.status_code == 400
    assert "max_length" in answer.text or "kv_memory" in answer.text
    assert post([*history, 8], {"max_tokens": 3}, session="v")["choices"][0]["kv"]["session"] == "continued"


def test_a_session_under_an_evictor_may_outgrow_max_length():
    options = {"max_length": 64}
    with served(engine_options=options) as (address, service), httpx.Client(base_url=address, timeout=60) as client:
        assert service.engine.positions > 200

        def post(history, **params):
            body = {"token_ids": history, "sparsity": "streaming:24+8,window=4,sinks=2"}
            body["sampling_params"] = {"ignore_eos": True} | params
            answer = client.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "a"})
            return answer.json()["choices"][0]

        history = [5] * 20
        for turn in range(3):
            answer = post(history, max_tokens=30)
            assert answer["kv"]["session"] == ("continued" if turn else "new")
            history += answer["token_ids"] + [7] * 20
        assert len(history) == 170
        assert len(post(history)["token_ids"]) == 1, "nothing is left of max_length"

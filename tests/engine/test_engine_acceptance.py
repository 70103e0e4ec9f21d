"""Acceptance measured by the engine, against two full forward passes of the plain model with replayed masks."""

import pytest
import torch

import oracle
from alula import Engine, Evict, Sampling, Schedule, Select, Sparsity
from alula.engine import scoring
from alula.engine.rollout import Rollout
from alula.errors import SettingError
from alula.models.load import load_model
from alula.sparsity.policy import DENSE

PROMPTS = [list(range(5, 12)), [3, 4, 5], [9, 8] * 13]
SAMPLING = Sampling(n=2, max_new_tokens=24, temperature=0.7, ignore_eos=True)
POLICIES = {
    "rkv": Sparsity(Evict("rkv", 10, buffer=4, window=3, sinks=2)),
    "random": Sparsity(Evict("random", 10, buffer=4, window=3, sinks=2)),
    "growing snapkv": Sparsity(Evict("snapkv", Schedule((8, 12, 16), width=12), buffer=3, window=3, sinks=2)),
    "quest": Sparsity(select=Select("quest", 12, 4, 1)),
    "scheduled block-topk": Sparsity(select=Select("block-topk", Schedule((12, 16), width=20), 4, 1)),
    "both": Sparsity(Evict("rkv", 18, buffer=4, window=3, sinks=2), Select("quest", 12, 4, 0)),
}


@pytest.fixture(scope="module")
def loaded():
    return oracle.custom_model(3)


@pytest.fixture(scope="module")
def engine(loaded):
    return Engine(loaded, page=4, kv_memory="4MiB", max_rows=16, lookahead=3)


@pytest.fixture(scope="module")
def dense_text(engine):
    return engine.generate(PROMPTS, SAMPLING)


def distributions(model, rollout: Rollout, temperature: float, page: int = 4) -> list[list[float]]:
    """Probabilities at every token, by a masked forward pass that replays the records of the rollout."""
    first = len(rollout.prompt_ids) - 1
    logits = oracle.replay(model, rollout, page).logits[first : first + len(rollout)].double()
    return (logits / temperature).softmax(-1).tolist()


def brute_force(model, rollout: Rollout, temperature: float = 0.7) -> list[float]:
    plain = Rollout(rollout.prompt_ids, rollout.token_ids, None, "length")
    pairs = zip(distributions(model, plain, temperature), distributions(model, rollout, temperature))
    return [sum(min(a, b) for a, b in zip(p, q)) for p, q in pairs]


def recorded(engine, rollout: Rollout, policy: Sparsity) -> Rollout:
    """The same tokens with what `policy` would have seen of them."""
    [score] = engine.score([rollout], policy, record=True)
    return Rollout(
        rollout.prompt_ids, rollout.token_ids, None, "length", history=score.history, selected=score.selected
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.slow
def test_forced_text_against_two_full_passes(name, engine, loaded, dense_text):
    for rollout, alpha in zip(dense_text[1::2], engine.acceptance(dense_text[1::2], POLICIES[name])):
        expected = brute_force(loaded.model, recorded(engine, rollout, POLICIES[name]))
        torch.testing.assert_close(alpha.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-5)
        assert min(expected) < 0.98, "the policy must really differ somewhere"
    assert engine.pool.in_use == 0


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.slow
def test_own_rollouts_forced_and_kept(name, engine, loaded):
    """Text of the sparse policy itself: forced decoding and the hidden states kept while sampling agree."""
    requests = engine.requests(PROMPTS, SAMPLING, POLICIES[name], record=True)
    for request in requests:
        request.keep_hidden = 1
    rollouts = sorted(engine.stream(requests), key=lambda r: (r.prompt_index, r.sample_index))
    assert [r.hidden is not None for r in rollouts] == [True, False] * 3
    firsts = rollouts[::2]
    kept, forced = engine.acceptance(firsts), engine.acceptance(firsts, POLICIES[name])
    for rollout, one, other in zip(firsts, kept, forced):
        assert one.shape == (len(rollout),)
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
        expected = torch.tensor(brute_force(loaded.model, rollout), dtype=torch.float64)
        torch.testing.assert_close(one.double(), expected, rtol=0, atol=2e-5)
    without = engine.acceptance(rollouts[1:2])  # no hidden states: its own policy is decoded again
    torch.testing.assert_close(without[0], engine.acceptance(rollouts[1:2], POLICIES[name])[0], rtol=0, atol=0)


def test_one_policy_per_rollout(engine, dense_text):
    """One call with a policy per rollout equals one call each; a rollout may be listed many times."""
    selecting = [Sparsity(select=Select("quest", budget, 4, 1)) for budget in (12, 16, 24)]
    policies = [DENSE, *selecting, POLICIES["rkv"]]
    pairs = [(rollout, policy) for policy in policies for rollout in dense_text]
    together = engine.acceptance([r for r, _ in pairs], [p for _, p in pairs])
    for i, policy in enumerate(policies):
        alone = engine.acceptance(dense_text, policy)
        for a, b in zip(alone, together[i * len(dense_text) : (i + 1) * len(dense_text)]):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_the_floor_of_dense_decoding_is_one_in_float32(engine, dense_text):
    for alpha in engine.acceptance(dense_text, DENSE):
        assert alpha.min() > 1 - 1e-5
        assert alpha.max() <= 1


def test_temperature(engine, loaded, dense_text):
    policy = POLICIES["rkv"]
    [hot] = engine.acceptance(dense_text[:1], policy, temperature=2.0)
    expected = brute_force(loaded.model, recorded(engine, dense_text[0], policy), 2.0)
    torch.testing.assert_close(hot.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-5)


def test_dense_hidden_states_in_host_memory(engine, dense_text, monkeypatch):
    expected = engine.acceptance(dense_text, POLICIES["quest"])
    monkeypatch.setattr(scoring, "TEACHER_BYTES", 0)
    for a, b in zip(expected, engine.acceptance(dense_text, POLICIES["quest"])):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_under_pressure(loaded, dense_text):
    """Sequences that are swapped out and prompts that are run again keep their α in step with their tokens."""
    small = Engine(loaded, page=4, kv_memory=24 * 4 * 2 * 3 * 2 * 12 * 4, max_rows=16, lookahead=3)
    roomy = Engine(loaded, page=4, kv_memory="4MiB", max_rows=16, lookahead=5)
    policies = [POLICIES["quest"]] * len(dense_text)
    for a, b in zip(small.acceptance(dense_text, policies), roomy.acceptance(dense_text, policies)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_invalid_input_raises(engine, dense_text):
    with pytest.raises(SettingError, match="sparsity: 2 policies for 6"):
        engine.acceptance(dense_text, [DENSE, DENSE])
    with pytest.raises(SettingError, match=r"select\.block=16"):
        engine.acceptance(dense_text, Sparsity(select=Select("quest", 64)))
    with pytest.raises(SettingError, match="temperature=0"):
        engine.acceptance(dense_text, DENSE, temperature=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", POLICIES)
def test_captured_steps_on_a_gpu_equal_the_cpu(name):
    """Forced text and kept hidden states, in graphs whose buffers served other requests before."""
    prompts, sampling = [[3, 4, 5], list(range(2, 60))], Sampling(max_new_tokens=120, ignore_eos=True)
    alphas = {}
    for device in ("cpu", "cuda"):
        loaded = load_model("shape:tiny-qwen3", dtype="float32")
        loaded.model.to(device)
        engine = Engine(loaded, page=4, kv_memory="256MiB", max_rows=8, max_length=512)
        if device == "cpu":
            text = engine.generate(prompts, sampling)
        requests = engine.requests(prompts, sampling, POLICIES[name])
        for request in requests:
            request.keep_hidden = 1
        rollouts = sorted(engine.stream(requests), key=lambda r: r.prompt_index)
        alphas[device] = [
            *engine.acceptance(text, POLICIES[name]),
            *engine.acceptance(rollouts),
            *engine.acceptance(text, DENSE),
        ]
    for a, b in zip(alphas["cpu"], alphas["cuda"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)

"""A prompt that will not fit is refused before the first step, by one sentence; what just fits runs to its end."""

import json

import pytest

import alula.models.shapes as shapes
import toy
from alula.errors import SettingError

EVICT = "sparsity.evict={method: snapkv, budget: 3, buffer: 1, window: 1, sinks: 1}"
WIDE = "sparsity.evict={method: snapkv, budget: 20, buffer: 4, window: 1, sinks: 1}"
SHORT = "data.max_prompt_tokens=6"
PAGE_BYTES = 4 * 1536
OTHERWISE = "sampling.max_new_tokens, or leave longer prompts out with data.max_prompt_tokens"


def pool(usable):
    """Page 0 is nobody's."""
    return f"engine.kv_memory={(usable + 1) * PAGE_BYTES}"


@pytest.fixture
def settings(tmp_path):
    """Forty prompts of 4 tokens and one of 26, all in one step, over pages of 4 tokens."""
    rows = [{"prompt": "a c :", "answer": "d a"}] * 40 + [{"prompt": "a c b d " * 6 + ":", "answer": "d a"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def made(*overrides):
        return toy.quick(
            tmp_path / "run",
            f"data={{source: {path}, prompt: '{{prompt}}', answer: '{{answer}}'}}",
            "model.tokenizer=task:successor",
            "rewards.use=[{name: format, options: {pattern: d}}]",
            "eval.every=0",
            "steps=1",
            "sampling.prompts=41",
            "objective.kl=0",
            "engine.page=4",
            "sampling.max_new_tokens=8",
            *overrides,
        )

    return made


def controlled(on_violation, *more):
    return EVICT, f"control={{enabled: true, vetoed: 0.05, on_violation: {on_violation}{''.join(more)}}}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        pytest.param(
            [toy.DENSE, "engine.max_length=32"],
            "engine.max_length=32: rollouts (dense) of the longest training prompt of 26 tokens with "
            f"sampling.max_new_tokens=8 may hold 34 KV tokens; raise it, lower {OTHERWISE}.",
            id="length",
        ),
        pytest.param(
            [toy.DENSE, pool(9)],
            "engine.kv_memory=61440 holds 9 pages of 4 tokens, and rollouts (dense) of the longest training prompt of "
            f"26 tokens with sampling.max_new_tokens=8 need 10; raise it, lower {OTHERWISE}.",
            id="pool",
        ),
        pytest.param([EVICT, pool(9)], "rollouts (snapkv 3+1) of the longest training prompt", id="pool-evicting"),
        pytest.param(
            [EVICT, SHORT, "engine.max_length=8", "objective.correction=reroll"],
            "engine.max_length=8: rerolls (dense) of the longest training prompt of 4 tokens",
            id="reroll",
        ),
        pytest.param(
            [EVICT, SHORT, "engine.max_length=8", "eval={every: 1, size: 8, max_new_tokens: 20}"],
            "engine.max_length=8: evaluations (dense) of the longest held-out prompt of 4 tokens with "
            "eval.max_new_tokens=20 may hold 24 KV tokens; raise it, lower eval.max_new_tokens, or leave",
            id="evaluation",
        ),
        pytest.param(
            [
                WIDE,
                SHORT,
                pool(12),
                "sampling.max_new_tokens=2",
                "eval={every: 1, size: 8, max_new_tokens: 20, sparse: true}",
            ],
            "evaluations (snapkv 20+4) of the longest held-out prompt of 4 tokens with eval.max_new_tokens=20 need 13",
            id="sparse-evaluation",
        ),
        pytest.param(
            [*controlled("adapt"), pool(24)],
            "rollouts at the controller's largest budget (snapkv 48+1) of the longest training prompt of 26 tokens",
            id="control-adapts",
        ),
        pytest.param(
            [*controlled("dense"), pool(24)],
            "rollouts at the controller's largest budget (snapkv 34+1) of the longest training prompt of 26 tokens",
            id="control-goes-dense",
        ),
        pytest.param(
            [WIDE, "distill.move={sparsity: 'snapkv:16+60,window=1,sinks=1', at: 1, prompts: 2}", pool(20)],
            "measurements of distill.move (snapkv 16+60) of the longest training prompt of 26 tokens",
            id="move",
        ),
    ],
)
def test_what_will_not_fit_is_said_before_the_first_step(settings, overrides, said):
    with pytest.raises(SettingError) as error:
        toy.trainer(settings(*overrides))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([toy.DENSE, "engine.max_length=34"], id="length"),
        pytest.param([toy.DENSE, pool(10)], id="pool"),
        pytest.param([EVICT, pool(10)], id="pool-evicting"),
        pytest.param(
            [EVICT, SHORT, "engine.max_length=12", "objective.correction={preset: reroll, veto: 0.9}"], id="reroll"
        ),
        pytest.param([*controlled("adapt", ", ladder: [3, 4]"), pool(12)], id="control"),
        pytest.param([*controlled("stop"), pool(10)], id="control-that-moves-nothing"),
    ],
)
def test_what_just_fits_runs(settings, overrides):
    assert toy.trainer(settings(*overrides)).run()


@pytest.mark.parametrize("policy", [toy.DENSE, EVICT])
def test_positions_that_the_model_does_not_have_are_refused(settings, monkeypatch, policy):
    """By every policy: an evictor holds few tokens, and the learner reads them all."""
    monkeypatch.setitem(shapes.SHAPES, "tiny-llama", shapes.SHAPES["tiny-llama"] | {"max_position_embeddings": 33})
    said = r"max_position_embeddings=33, and .* comes to 34; lower .* or set engine.max_length=34 if the model can"
    with pytest.raises(SettingError, match=said):
        toy.trainer(settings(policy))
    assert toy.trainer(settings(policy, "engine.max_length=34", "out=" + str(settings().out) + "-told")).run()

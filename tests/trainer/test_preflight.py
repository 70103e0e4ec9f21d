"""Pre-flight: a prompt that does not fit raises before the first step; one that just fits runs to the end."""

import json

import pytest

import alula.models.shapes as shapes
import toy
from alula.errors import SettingError
from alula.trainer.check import print_plan
from alula.trainer.preflight import Preflight

EVICT = "sparsity.evict={method: snapkv, budget: 3, buffer: 1, window: 1, sinks: 1}"
WIDE = "sparsity.evict={method: snapkv, budget: 20, buffer: 4, window: 1, sinks: 1}"
SHORT = "data.max_prompt_tokens=6"
PAGE_BYTES = 4 * 1536


def pool(usable):
    """Page 0 is the scratch page."""
    return f"engine.kv_memory={(usable + 1) * PAGE_BYTES}"


@pytest.fixture
def settings(tmp_path):
    """Forty prompts of 4 tokens and one of 26, all in one step, over pages of 4 tokens."""
    rows = [{"prompt": "a c :", "answer": "d a"}] * 40 + [{"prompt": "a c b d " * 6 + ":", "answer": "d a"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def build(*overrides):
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

    return build


def controlled(on_violation, *more):
    return EVICT, f"control={{enabled: true, vetoed: 0.05, on_violation: {on_violation}{''.join(more)}}}"


TRAINING = ("training prompt of 26 tokens", "sampling.max_new_tokens=8", "data.max_prompt_tokens")
HELD_OUT = ("evaluations", "held-out prompt of 4 tokens", "eval.max_new_tokens=20")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param(
            [toy.DENSE, "engine.max_length=32"],
            ["engine.max_length=32", "rollouts (dense)", *TRAINING, "34 KV tokens", "lower sampling.max_new_tokens"],
            id="length",
        ),
        pytest.param(
            [toy.DENSE, pool(9)],
            ["engine.kv_memory=61440", "9 pages of 4 tokens", "rollouts (dense)", *TRAINING, "need 10"],
            id="pool",
        ),
        pytest.param(
            [EVICT, pool(9)],
            ["engine.kv_memory=", "rollouts (snapkv:3+1,window=1,sinks=1)", *TRAINING],
            id="pool-evicting",
        ),
        pytest.param(
            [EVICT, SHORT, "engine.max_length=8", "objective.correction=reroll"],
            ["engine.max_length=8", "rerolls (dense)", "training prompt of 4 tokens"],
            id="reroll",
        ),
        pytest.param(
            [EVICT, SHORT, "engine.max_length=8", "eval={every: 1, size: 8, max_new_tokens: 20}"],
            ["engine.max_length=8", "(dense)", *HELD_OUT, "24 KV tokens", "lower eval.max_new_tokens"],
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
            ["engine.kv_memory=", "(snapkv:20+4,window=1,sinks=1)", *HELD_OUT, "need 13"],
            id="sparse-evaluation",
        ),
        pytest.param(
            [*controlled("adapt"), pool(24)],
            ["engine.kv_memory=", "largest budget (snapkv:48+1,window=1,sinks=1)", *TRAINING],
            id="control-adapts",
        ),
        pytest.param(
            [*controlled("dense"), pool(24)],
            ["engine.kv_memory=", "largest budget (snapkv:34+1,window=1,sinks=1)", *TRAINING],
            id="control-goes-dense",
        ),
        pytest.param(
            [WIDE, "distill.move={sparsity: 'snapkv:16+60,window=1,sinks=1', at: 1, prompts: 2}", pool(20)],
            ["engine.kv_memory=", "distill.move (snapkv:16+60,window=1,sinks=1)", *TRAINING],
            id="move",
        ),
    ],
)
def test_a_prompt_that_does_not_fit_raises_before_the_first_step_and_in_check(settings, overrides, parts):
    with pytest.raises(SettingError) as planned:
        print_plan(settings(*overrides))
    with pytest.raises(SettingError) as error:
        toy.trainer(settings(*overrides))
    assert [part for part in parts if part not in str(error.value)] == []
    assert str(planned.value) == str(error.value)


def test_check_counts_what_the_run_will_use(settings):
    rows = dict(Preflight(settings(SHORT, "eval={every: 1, size: 39}")).describe_data())
    assert "prompts.jsonl: 2 examples" in rows["data"]
    assert "38 examples" in rows["held-out data"]
    assert "1 (prompt over 6 tokens)" in rows["held-out data"]


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
@pytest.mark.slow
def test_longest_prompt_that_fits_runs(settings, overrides):
    print_plan(settings(*overrides))
    assert toy.trainer(settings(*overrides)).run()


@pytest.mark.parametrize("policy", [toy.DENSE, EVICT])
@pytest.mark.slow
def test_sequences_longer_than_the_positions_raise(settings, monkeypatch, policy):
    """Under every policy: an evictor holds few tokens, but the learner reads all of them."""
    monkeypatch.setitem(shapes.SHAPES, "tiny-llama", shapes.SHAPES["tiny-llama"] | {"max_position_embeddings": 33})
    with pytest.raises(SettingError, match=r"max_position_embeddings=33.* 34;.*max_new_tokens.*engine\.max_length=34"):
        toy.trainer(settings(policy))
    assert toy.trainer(settings(policy, "engine.max_length=34", "out=" + str(settings().out) + "-longer")).run()

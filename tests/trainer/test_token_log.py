"""rollouts.jsonl: the rollouts of one prompt, token by token."""

import math

import pytest
import torch

import toy
from alula.data import Example
from alula.engine.rollout import NEVER, KVUse, Rollout
from alula.trainer.batch import RolloutBatch
from alula.trainer.token_log import evicted_digits, rounded


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    out = tmp_path_factory.mktemp("recorded") / "run"
    assert toy.trainer(toy.quick(out, "logging.rollouts=2", "objective.correction.veto=0.9")).run()
    return out


def test_the_first_prompts_rollouts_are_written_every_so_many_steps(recorded):
    rows = toy.rows(recorded, "rollouts.jsonl")
    assert [row["step"] for row in rows] == [1, 3]
    first = toy.rows(recorded, "completions.jsonl")[0]
    for row in rows:
        assert (len(row["rollouts"]), row["veto"]) == (4, 0.9)
        for rollout in row["rollouts"]:
            assert len(rollout["tokens"]) == len(rollout["log_ratio"])
            assert len(rollout["evicted"]) == len(row["prompt"]) + len(rollout["tokens"])
            assert set(rollout["evicted"]) <= set("0123456789")
            assert rollout["vetoed"] == any(ratio < math.log(0.9) for ratio in rollout["log_ratio"])
    group = rows[0]
    assert "".join(group["prompt"]).removeprefix("<bos>").split() == first["prompt"].split()
    assert group["rollouts"][0]["reward"] == first["reward"]
    assert any(set(rollout["evicted"]) > {"0"} for rollout in group["rollouts"]), "something was evicted"
    assert any(rollout["vetoed"] for row in rows for rollout in row["rollouts"])


def test_writing_them_changes_no_number(recorded, tmp_path):
    assert toy.trainer(toy.quick(tmp_path / "run", "logging.rollouts=0", "objective.correction.veto=0.9")).run()
    with_rows, without = toy.files(recorded), toy.files(tmp_path / "run")
    assert without.pop("rollouts.jsonl") == []
    with_rows.pop("rollouts.jsonl")
    assert with_rows == without


def test_a_dense_run_has_no_evictions(tmp_path):
    assert toy.trainer(toy.quick(tmp_path / "run", toy.DENSE, "steps=1", "eval.every=0")).run()
    (row,) = toy.rows(tmp_path / "run", "rollouts.jsonl")
    assert {rollout["evicted"] for rollout in row["rollouts"]} == {None}


def test_shares_of_heads_and_numbers_that_are_not_finite():
    history = torch.full((2, 2, 9), NEVER, dtype=torch.int32)
    history[:, :, 1] = 5  # evicted in all four heads
    history[0, 0, 2] = 5  # in one
    history[:, :, 8] = 9  # beyond the answer
    rollout = Rollout([7, 7, 7], [8, 8], torch.zeros(2), "stop", history=history)
    assert evicted_digits(rollout) == "09200"
    assert rounded(torch.tensor([0.12345, math.inf, math.nan])) == [0.123, None, None]


def test_completions_of_chat_prompts_whose_content_is_no_text():
    parts = [{"type": "text", "text": "one "}, {"type": "image", "url": "x.png"}, {"type": "text", "text": "two"}]
    prompt = [{"role": "user", "content": "first"}, {"role": "assistant", "content": None, "tool_calls": []}]
    prompt += [{"role": "tool"}, {"role": "user", "content": parts}]
    rollout = Rollout([1], [2], None, "stop", KVUse(1, 1, 1, 1, 1), text="done")
    (row,) = RolloutBatch([rollout], [Example(prompt)], n=1, rewards=[1.0]).completions(1, [False])
    assert (row["prompt"], row["completion"]) == ("first\none two", "done")

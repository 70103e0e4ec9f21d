"""TriAttention in a run: the queries' statistics follow the weights, and their text is in the checkpoint."""

import torch

import toy

SPARSITY = "sparsity=triattention:24+8,window=4"


def test_a_resumed_run_equals_an_uninterrupted_one_and_statistics_follow_the_weights(tmp_path):
    whole = toy.trainer(toy.quick(tmp_path / "whole", SPARSITY))
    first = whole.rollouts.engine.query_statistics
    assert first is not None
    assert len(first.text) == 16, "the dense answers to the first prompts"
    whole.run()
    last = whole.rollouts.engine.query_statistics
    assert last.text == first.text
    assert not torch.equal(last.mean, first.mean)
    toy.trainer(toy.quick(tmp_path / "parts", SPARSITY, "steps=2")).run()
    resumed = toy.trainer(toy.quick(tmp_path / "parts", SPARSITY), resume=True)
    assert resumed.rollouts.engine.query_statistics.text == first.text
    resumed.run()
    assert toy.files(tmp_path / "parts")["metrics.jsonl"] == toy.files(tmp_path / "whole")["metrics.jsonl"]


def test_other_runs_measure_no_queries(tmp_path):
    assert toy.trainer(toy.quick(tmp_path / "run")).rollouts.engine.query_statistics is None

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rank_keys_worker
from alula.distributed import World, init_world
from alula.errors import SettingError
from alula.run.checkpoint import Checkpoints
from alula.settings import LoRASettings
from distributed_worker import learner, rollouts, step, summary
from forked_ranks import run_on_nodes
from two_ranks import fork_two_ranks, run_on_two_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

LAYOUTS = {"two-ranks": (1, 2), "two-nodes": (2, 1), "two-nodes-of-two": (2, 2)}
"""Nodes and ranks per node: sharded, replicated, and both."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Gloo processes on the CPU, all scenarios in one launch; first a checkpoint of one process for them."""
    alone = learner(World())
    step(alone)
    outs = {layout: tmp_path_factory.mktemp(name) for name, layout in LAYOUTS.items()}
    for out in outs.values():
        Checkpoints(out / "single").save(1, alone.tensors(), {"learner": alone.state()})
    run_on_nodes("distributed_worker", outs)
    return outs


@pytest.fixture(params=LAYOUTS)
def ranks(request, reports):
    out = reports[LAYOUTS[request.param]]
    return out, json.loads((out / "report.json").read_text())


def close(result, parameters, atol=1e-6):
    expected = dict(parameters)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value.detach(), atol=atol, rtol=0)


def test_same_loss_and_same_parameters_as_one_process(ranks):
    out, report = ranks
    alone = learner(World(), keep_reference=True)
    for number, result in enumerate(report["steps"], start=1):
        expected = summary(step(alone))
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert result["metrics"] == pytest.approx(expected["metrics"], abs=1e-6)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], abs=1e-6)
        assert result["grad_norm"] > 0.1  # so that clipping, too, is over both ranks
        for count in ("taken", "tokens", "scored_tokens"):
            assert result[count] == expected[count]
        if number > 1:
            close(load_file(out / f"after-{['two', 'three'][number - 2]}.safetensors"), alone.full_parameters())
    scores, references = alone.score(rollouts()), alone.score(rollouts(), reference=True)
    for (result, reference), a, b in zip(report["scores"], scores, references):
        assert result == pytest.approx(a.tolist(), abs=1e-5)
        assert reference == pytest.approx(b.tolist(), abs=1e-5)


def test_weights_are_sharded_within_a_node_and_replicated_across_nodes(ranks, request):
    _, report = ranks
    nodes, local = LAYOUTS[request.node.callspec.params["ranks"]]
    vocabulary = learner(World()).model.config.vocab_size
    values: dict[int, set[float]] = {}
    for rank, here in enumerate(report["mesh"]):
        assert here["shape"] == ([local] if nodes == 1 else [nodes, local])
        assert here["place"] == ([rank] if nodes == 1 else [rank // local, rank % local])
        assert here["rows"] == vocabulary // local
        assert set(here["timeouts"]) == {120}
        values.setdefault(rank % local, set()).add(here["sum"])
    assert all(len(equal) == 1 for equal in values.values()), "replicas differ"
    assert len(values) == local


def test_nodes_of_different_sizes_are_rejected(monkeypatch):
    for name, number in (("WORLD_SIZE", 12), ("GROUP_WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 8)):
        monkeypatch.setenv(name, str(number))
    with pytest.raises(SettingError, match=r"8 of the 12 ranks.*nproc-per-node"):
        init_world("cpu")


def test_restarts_that_would_fail_are_rejected(monkeypatch):
    for name, value in (("WORLD_SIZE", 2), ("TORCHELASTIC_MAX_RESTARTS", 3), ("TORCHELASTIC_USE_AGENT_STORE", True)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SettingError, match=r"--max-restarts=3.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        init_world("cpu")


def test_resume_on_several_ranks_is_bit_exact(ranks):
    _, report = ranks
    assert [r["rank"] for r in report["resumed"]] == list(range(len(report["mesh"])))
    assert all(r["equal"] and r["tensors"] > 20 for r in report["resumed"])


def test_checkpoints_move_between_one_process_and_several(ranks):
    out, _ = ranks
    checkpoints = Checkpoints(out / "checkpoints")
    files = {p.suffix for p in checkpoints.latest().iterdir()}
    assert files == {".safetensors", ".json", ""}
    alone = learner(World())
    alone.resume(checkpoints.load(checkpoints.latest(), alone.tensors())["learner"])
    assert alone.steps == 2
    after_two = load_file(out / "after-two.safetensors")
    for name, parameter in alone.full_parameters():
        assert torch.equal(parameter, after_two[name])
    step(alone)
    close(load_file(out / "after-three.safetensors"), alone.full_parameters())

    one = learner(World())
    step(one)
    for name, parameter in load_file(out / "from-one.safetensors").items():
        assert torch.equal(parameter, dict(one.full_parameters())[name])


def test_a_nan_on_one_rank_skips_the_step_on_all(ranks):
    _, report = ranks
    assert set(report["poisoned"]) == {False}
    assert report["untouched"]


def test_lora_and_half_precision(ranks):
    out, report = ranks
    alone = learner(World(), lora=LoRASettings(rank=2, alpha=4))
    step(alone)
    close(load_file(out / "lora.safetensors"), alone.full_parameters())
    for dtype in ("bfloat16", "float16"):
        expected = summary(step(learner(World(), dtype=dtype)))
        assert report[dtype]["loss"] == pytest.approx(expected["loss"], rel=0.02)
        assert report[dtype]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)
        assert report[dtype]["dtypes"] == report[dtype]["held"] == [f"torch.{dtype}"]
        initial = learner(World(), dtype=dtype).score(rollouts())
        for result, score in zip(report[dtype]["reference"], initial, strict=True):
            assert result == pytest.approx(score.tolist(), abs=0.05)


def test_a_float32_residual_stream_is_not_cast_between_layers(ranks):
    _, report = ranks
    expected = summary(step(learner(World(), dtype="bfloat16", residual="float32")))
    assert report["residual"]["streams"] == ["torch.float32"]
    for name in ("loss", "grad_norm"):
        assert report["residual"][name] == pytest.approx(expected[name], rel=0.02)


def test_export_from_several_ranks(ranks):
    out, _ = ranks
    loaded = AutoModelForCausalLM.from_pretrained(out / "exported")
    for name, value in load_file(out / "after-three.safetensors").items():
        assert torch.equal(loaded.get_parameter(name), value)


def test_a_world_of_one_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = init_world("cpu")
    assert (world.rank, world.size, world.is_distributed) == (0, 1, False)
    assert world.all_max(3) == 3
    assert world.all_gather("x") == ["x"]
    assert not torch.distributed.is_initialized()


@pytest.fixture(scope="module")
def one_and_two_ranks(tmp_path_factory):
    """The same runs in this process and on two ranks."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one-rank", "two-ranks-keys"))
    for scenario in rank_keys_worker.SCENARIOS:
        rank_keys_worker.train(scenario, one)
    fork_two_ranks(rank_keys_worker.__file__, two)
    return one, two


@pytest.mark.parametrize("scenario", rank_keys_worker.SCENARIOS)
def test_samples_do_not_depend_on_the_number_of_ranks(one_and_two_ranks, scenario):
    """Three steps: the same tokens for every (prompt index, sample), the same groups chosen by dynamic sampling."""
    one, two = one_and_two_ranks
    alone = json.loads((one / f"{scenario}-0.json").read_text())
    shares = [json.loads((two / f"{scenario}-{rank}.json").read_text()) for rank in range(2)]
    for number, together in enumerate(alone):
        assert shares[0][number] | shares[1][number] == together
    for name, keys in (("metrics.jsonl", None), ("evals.jsonl", ("accuracy", "length"))):
        rows = [[json.loads(line) for line in (out / scenario / name).read_text().splitlines()] for out in (one, two)]
        for a, b in zip(*rows, strict=True):
            for key in keys or [key for key in a if not key.startswith(("time/", "speed/", "kv/bytes"))]:
                assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-5), key


def test_torchrun_restarts_a_run_whose_rank_was_killed(one_and_two_ranks, tmp_path):
    """The killed step is done again from the checkpoint, and every number equals that of a run without the loss."""
    _, two = one_and_two_ranks
    worker = Path(rank_keys_worker.__file__).with_name("killed_rank_worker.py")
    run_on_two_ranks(worker, tmp_path, options=["--max-restarts=1"])
    for name in ("metrics.jsonl", "evals.jsonl"):
        a, b = (
            [json.loads(line) for line in (out / "groups" / name).read_text().splitlines()] for out in (two, tmp_path)
        )
        for expected, row in zip(a, b, strict=True):
            steady = [key for key in expected if not key.startswith(("time", "speed/"))]
            assert {key: row[key] for key in steady} == {key: expected[key] for key in steady}

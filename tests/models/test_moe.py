"""Mixtures of experts (a tiny Qwen3-MoE): engine, learner and adapters."""

import pytest
import torch

import oracle
import toy
from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.errors import SettingError
from alula.learner.learner import Learner, training_flops
from alula.models.experts import active_share, check_graphs, expert_parameters, is_experts
from alula.models.load import load_model
from alula.models.lora import linears
from alula.settings import LearnerSettings
from command_line import alula

MOE = "shape:tiny-qwen3-moe"
PROMPTS = [list(range(5, 12)), [9, 8, 60] * 8, [7]]
POLICIES = {
    "evict": Sparsity(Evict("rkv", 10, buffer=4, window=3, sinks=2)),
    "select": Sparsity(select=Select("block-topk", 12, block=4, dense_layers=1)),
}


@pytest.fixture(scope="module")
def loaded():
    return load_model(MOE)


@pytest.fixture(scope="module")
def engine(loaded):
    return Engine(loaded, page=4, kv_memory="4MiB", max_rows=8, lookahead=3)


def test_greedy_equals_transformers(engine, loaded):
    for rollout in engine.generate(PROMPTS, Sampling(max_new_tokens=16, temperature=0, ignore_eos=True)):
        assert rollout.token_ids == oracle.greedy(loaded.model, rollout.prompt_ids, 16)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_sparse_log_probs_agree_with_the_oracle(engine, loaded, policy):
    rollouts = engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=20, ignore_eos=True), policy, record=True)
    for rollout in rollouts:
        expected = oracle.logprobs(oracle.replay(loaded.model, rollout, 4), rollout)
        torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=2e-5)
    assert sum(r.kv.evictions for r in rollouts) > 0 or policy.select


def test_a_sequence_does_not_depend_on_its_batch(engine):
    sampling = Sampling(n=4, max_new_tokens=16, ignore_eos=True)
    together = engine.generate(PROMPTS, sampling, POLICIES["evict"])
    for index, prompt in enumerate(PROMPTS):
        alone = engine.generate([prompt], sampling, POLICIES["evict"], indices=[index])
        for one, other in zip(alone, together[4 * index : 4 * index + 4]):
            assert one.token_ids == other.token_ids
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


def test_experts_and_router_are_trained():
    loaded = load_model(MOE)
    engine = Engine(loaded, page=4, kv_memory="2MiB")
    rollouts = engine.generate(PROMPTS, Sampling(n=2, max_new_tokens=8))
    learner = Learner(loaded.model, LearnerSettings(lr=1e-2, activation_checkpointing=False))
    torch.testing.assert_close(
        torch.cat(learner.score(rollouts, 1.0)), torch.cat([r.logprobs for r in rollouts]), rtol=0, atol=2e-5
    )
    before = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    learner.update(
        rollouts, lambda logprobs, entropy, batch: (-logprobs.sum(), {"tokens": torch.tensor(len(logprobs))})
    )
    changed = {name for name, p in loaded.model.named_parameters() if not torch.equal(p, before[name])}
    assert {name.rpartition("layers.0.")[2] for name in changed} >= {
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        "mlp.gate.weight",
    }


def test_counts(loaded):
    experts = expert_parameters(loaded.model)
    assert experts == 3 * 8 * (2 * 32 * 64 + 64 * 32)
    assert active_share(loaded.model) == 2 / 8
    assert active_share(load_model("shape:tiny-llama").model) == 1
    dense = sum(
        p.numel() for p in loaded.model.parameters()
        if not is_experts(p) and p is not loaded.model.get_input_embeddings().weight
    )  # fmt: skip
    assert training_flops(loaded.model, [1], 0).layers == 6 * (dense + experts / 4)
    assert not any("experts" in name for name, _ in linears(loaded.model))


@pytest.mark.parametrize(
    ("setting", "name"),
    [("learner.lora={rank: 2}", "learner.lora"), ("distill={rank: 2, activation_checkpointing: false}", "distill")],
)
def test_a_run_reports_that_adapters_leave_experts_out(tmp_path, capsys, monkeypatch, setting, name):
    monkeypatch.setenv("COLUMNS", "400")
    config = toy.quick(tmp_path, f"model.source={MOE}", setting, "steps=1", "eval.every=0")
    run = toy.trainer(config)
    run.run()
    [event] = [row for row in toy.rows(tmp_path, "events.jsonl") if row["kind"] == "experts-left-out"]
    assert event["message"].startswith(f"{name} adapts linear layers only: the experts and their router, ")
    assert alula("train", "--check", toy.RECIPE, f"out={tmp_path / 'other'}", f"model.source={MOE}", setting) == 0
    assert event["message"][:60] in capsys.readouterr().out


def test_models_without_experts_report_nothing(tmp_path):
    toy.trainer(toy.quick(tmp_path, "learner.lora={rank: 2}", "steps=1", "eval.every=0")).run()
    assert not [row for row in toy.rows(tmp_path, "events.jsonl") if row["kind"] == "experts-left-out"]


def test_float32_experts_are_not_captured(loaded):
    """Seen on an H200: in float32 torch reads the groups' sizes on the host, which a capture rejects."""
    dense = load_model("shape:tiny-qwen3").model
    assert [check_graphs(model, None, cuda=True) for model in (loaded.model, dense)] == [False, True]
    assert check_graphs(load_model(MOE, dtype="bfloat16").model, None, cuda=True)
    assert not check_graphs(dense, None, cuda=False)
    with pytest.raises(SettingError, match="graphs=True: a mixture of experts in float32"):
        check_graphs(loaded.model, True, cuda=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dtype):
    """Captured (bfloat16) or not (float32), the engine agrees with the learner's packed scores."""
    loaded = load_model(MOE, device="cuda", dtype=dtype)
    engine = Engine(loaded, kv_memory="64MiB", max_rows=16)
    for policy in (Sparsity(), Sparsity(Evict("rkv", 16, buffer=8, window=4, sinks=2))):
        rollouts = engine.generate(PROMPTS, Sampling(n=4, max_new_tokens=60, ignore_eos=True), policy)
        scores = engine.score(rollouts, policy)
        apart = torch.cat([r.logprobs - s.logprobs.cpu() for r, s in zip(rollouts, scores)]).abs()
        assert apart.mean() < (1e-4 if dtype == "float32" else 0.1)

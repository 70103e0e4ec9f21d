"""TRL's trainer with Alula's rollouts, on a tiny model; run as a script by torchrun, one of two processes."""

import copy
import math
import subprocess
import sys
from statistics import fmean, stdev

import pytest
import torch

from alula.errors import SettingError
from alula.objective.correction import Correction, correct
from alula.objective.policy_loss import divisors, policy_loss
from alula.objective.settings import Loss

trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402

from alula.data.load_tokenizer import attach_tokenizer  # noqa: E402
from alula.data.tasks import build  # noqa: E402
from alula.data.tasks.tokenizer import task_tokenizer  # noqa: E402
from alula.integrations.trl import SparseGRPOTrainer  # noqa: E402
from alula.models.load import load_model  # noqa: E402
from two_ranks import run_on_two_ranks  # noqa: E402

RKV = "rkv:16+8,window=4,sinks=2"
GENEROUS = "rkv:512+128"
WORDS = ["a b c", "b d a", "c : d", "d d b"]
TOKENIZER = task_tokenizer(build("successor", symbols=4, prefix=2, length=2))
TEMPERATURE = 0.8


def reward(text):
    """A reward that differs between the completions of a group."""
    return sum(place * text.count(word) for place, word in enumerate("abcd:")) / 10


def score_words(completions, **_):
    return [reward(text) for text in completions]


def build_trainer(out, cls=SparseGRPOTrainer, model=None, others=None, **settings):
    """A trainer of `cls` with TRL's `settings`; `others` are its other arguments."""
    model = model or attach_tokenizer(load_model("shape:tiny-llama"), TOKENIZER, resize=True).model
    settings = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 40,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "temperature": TEMPERATURE,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
    } | settings
    if cls is SparseGRPOTrainer:
        others = {"sparsity": RKV, "engine": {"kv_memory": "16MiB"}} | (others or {})
    data = Dataset.from_list([{"prompt": prompt} for prompt in WORDS])
    arguments = {"eval_dataset": data, "processing_class": copy.deepcopy(TOKENIZER), **(others or {})}
    return cls(model, score_words, trl.GRPOConfig(**settings), data, **arguments)


def collected(trainer):
    """A batch of eight completions, as training would get it before TRL shuffles it."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer._generate_and_score_completions([{"prompt": prompt} for prompt in WORDS[:2] for _ in range(4)])


def gradient(trainer, batch):
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def logprobs_by_hand(model, batch):
    """Log-probs of each completion's tokens: one prompt and completion at a time, without padding."""
    logprobs = []
    for prompt, seen, ids, mask in zip(
        *(batch[f"{part}_{what}"] for part in ("prompt", "completion") for what in ("ids", "mask"))
    ):
        prompt, ids = prompt[seen.bool()], ids[mask.bool()]
        logits = model(input_ids=torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        logprobs.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])
    return logprobs


@pytest.mark.parametrize(("sparsity", "bf16"), [("dense", False), (RKV, False), (RKV, True)])
def test_two_steps_of_training(tmp_path, sparsity, bf16):
    trainer = build_trainer(tmp_path, others={"sparsity": sparsity, "correction": "tis"}, bf16=bf16)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert all(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters()))
    *steps, _ = trainer.state.log_history
    assert len(steps) == 2
    names = "veto_rate veto_rate_token kl_k1 kl_k3 ess xi_p01 xi_p05 xi_p50 xi_p95 xi_p99 rejected capped_token"
    for row in steps:
        assert all(math.isfinite(row[f"mismatch/{name}"]) for name in names.split())
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0
        if sparsity == "dense":
            assert row["kv/saved"] == 0
            assert row["mismatch/kl_k3"] < 1e-8
        else:
            assert row["kv/saved"] > 0.05
            assert 0.1 < row["mismatch/ess"] < 0.9999
            assert row["mismatch/xi_p01"] < 0.99 < 1.01 < row["mismatch/xi_p99"]


@pytest.mark.parametrize("bf16", [False, True])
def test_engine_follows_the_optimizer(tmp_path, bf16):
    trainer = build_trainer(tmp_path, bf16=bf16, max_steps=1)
    sampled = []
    generate = trainer.engine.generate
    trainer.engine.generate = lambda *a, **k: sampled.append(generate(*a, **k)) or sampled[-1]
    batch = collected(trainer)
    trainer.engine.wake()
    start = torch.cat([score.logprobs for score in trainer.engine.score(sampled[0])])
    trainer.train()
    collected(trainer)  # a copy of the weights is refreshed when it generates
    assert [rollouts[0].policy_version for rollouts in sampled] == [0, 0, 1]
    trainer.engine.wake()
    now = torch.cat([score.logprobs for score in trainer.engine.score(sampled[0])])
    assert (now - start).abs().max() > 0.01
    dense, mask = trainer._dense_logprobs(batch), batch["completion_mask"].bool()
    torch.testing.assert_close(now, dense[mask], rtol=0, atol=0.1 if bf16 else 1e-4)
    for ours, theirs in zip(trainer.engine.model.parameters(), trainer.model.parameters()):
        assert ours.dtype == (torch.bfloat16 if bf16 else torch.float32)
        assert (ours is theirs) != bf16
        assert torch.equal(ours, theirs.to(ours.dtype))
    assert trainer.model.training
    assert not trainer.engine.model.training, "dropout would change the policy"


def test_resumed_run_is_the_same(tmp_path):
    uninterrupted = build_trainer(tmp_path, save_strategy="steps", save_steps=1)
    uninterrupted.train()
    resumed = build_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for one, other in zip(uninterrupted.model.parameters(), resumed.model.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "dr_grpo"])
def test_budget_above_length_is_plain_trl(tmp_path, loss_type):
    """The same completions give plain TRL the same loss and gradient; bit for bit without a correction."""
    ours = build_trainer(tmp_path, others={"sparsity": GENEROUS}, loss_type=loss_type)
    batch = collected(ours)
    completions = [ids[mask.bool()].tolist() for ids, mask in zip(batch["completion_ids"], batch["completion_mask"])]
    plain = build_trainer(tmp_path, trl.GRPOTrainer, model=ours.model, loss_type=loss_type)
    plain._generate_single_turn = lambda *_, **__: (completions, None)
    expected_batch = collected(plain)
    assert expected_batch["advantages"].dim() == 1
    expected = gradient(plain, expected_batch)
    torch.testing.assert_close(gradient(ours, batch), expected, rtol=1e-4, atol=1e-6)

    ours.correction = Correction.none()
    ours.engine.generate = lambda prompts, *_, **__: rollouts(prompts, completions, batch)
    again = gradient(ours, collected(ours))
    assert torch.equal(again[0], expected[0])
    assert torch.equal(again[1], expected[1])


def rollouts(prompts, completions, batch):
    from alula.engine.rollout import KVUse, Rollout

    return [
        Rollout(prompts[i // 4], ids, batch["sampling_per_token_logps"][i, : len(ids)], "stop", KVUse(1, 1.0, 1.0))
        for i, ids in enumerate(completions)
    ]


@pytest.mark.parametrize(
    "correction",
    ["sparse-rl", "tis", "icepop", Correction.named("sparse-rl", veto=0.6), Correction.named("tis", cap=1.05)],
)
@pytest.mark.parametrize("iterations", [1, 2])
def test_advantages_are_folded_as_by_hand(tmp_path, correction, iterations):
    """A · w · keep, token by token: from the completions' text to the tensor that TRL trains on."""
    trainer = build_trainer(tmp_path, others={"correction": correction}, num_iterations=iterations)
    batch, c = collected(trainer), trainer.correction
    assert ("old_per_token_logps" in batch) == (iterations > 1)
    with torch.no_grad():
        dense = logprobs_by_hand(trainer.model, batch)
    texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    dropped = 0
    for row in range(8):
        group = [reward(text) for text in texts[row // 4 * 4 : row // 4 * 4 + 4]]
        advantage = (group[row % 4] - fmean(group)) / (stdev(group) + 1e-4)
        xi = (dense[row] - batch["sampling_per_token_logps"][row, : len(dense[row])]).exp().tolist()
        vetoed = c.veto is not None and min(xi) < c.veto
        dropped += vetoed
        for t, value in enumerate(batch["advantages"][row].tolist()):
            weight = 0.0
            if t < len(xi) and not vetoed and (c.mask == "none" or c.mask_low <= xi[t] <= c.mask_high):
                weight = min(xi[t], c.cap or math.inf)
            assert value == pytest.approx(advantage * weight, rel=1e-3, abs=1e-5)
    if c.veto == 0.6:
        assert 0 < dropped < 8, "the veto is not tried"


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_accepted_divisors_and_kl(tmp_path, loss_type):
    """Sparse-RL's released loss: dropped tokens are left out of sums, divisors and KL. Equal to Alula's loss."""
    model = attach_tokenizer(load_model("shape:tiny-llama"), TOKENIZER, resize=True).model
    model.save_pretrained(tmp_path / "model")
    correction = Correction.named("sparse-rl-code", veto=0.3, mask_low=0.9)
    trainer = build_trainer(
        tmp_path,
        model=str(tmp_path / "model"),
        others={"correction": correction},
        beta=0.1,
        loss_type=loss_type,
        epsilon_high=0.2,
        use_bias_correction_kl=False,
    )
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(0.9)
    batch = collected(trainer)
    loss, grad = gradient(trainer, batch)

    plain = build_trainer(tmp_path, trl.GRPOTrainer, model=trainer.model)
    ids = [ids[mask.bool()].tolist() for ids, mask in zip(batch["completion_ids"], batch["completion_mask"])]
    plain._generate_single_turn = lambda *_, **__: (ids, None)
    advantages = collected(plain)["advantages"]
    trainer.model.zero_grad()
    dense = logprobs_by_hand(trainer.model, batch)
    sequence = torch.arange(8).repeat_interleave(torch.tensor([len(row) for row in dense]))
    with torch.no_grad():
        reference = torch.cat(logprobs_by_hand(trainer.ref_model, batch))
    sparse = batch["sampling_per_token_logps"][batch["completion_mask"].bool()]
    logprobs = torch.cat(dense)
    corrected = correct(logprobs.detach(), sparse, sequence, correction, sequences=8)
    assert 0.01 < (~corrected.token_keep).double().mean() < 0.9
    kind = Loss(loss_type, clip_high=0.2, kl=0.1)
    parts = divisors(kind, correction, sequence, 8, corrected)
    expected, _ = policy_loss(
        logprobs,
        logprobs.detach(),
        advantages[sequence],
        corrected.weights,
        sequence,
        kind,
        parts,
        reference_logprobs=reference,
        kl_mask=corrected.token_keep,
    )
    expected.backward()
    share = trainer.current_gradient_accumulation_steps  # TRL scales a micro-batch; this one is two of them
    share = share if loss_type == "grpo" else 1
    torch.testing.assert_close(loss * share, expected.detach(), rtol=1e-4, atol=1e-6)
    hand = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    torch.testing.assert_close(grad * share, hand, rtol=1e-3, atol=1e-5)


def test_evaluation_is_dense_and_prompts_are_shared(tmp_path):
    trainer = build_trainer(tmp_path)
    requests = []
    generate = trainer.engine.generate

    def spy(prompts, sampling, sparsity, **options):
        requests.append((len(prompts), sampling.n, sparsity.dense))
        return generate(prompts, sampling, sparsity, **options)

    trainer.engine.generate = spy
    collected(trainer)
    assert requests == [(2, 4, False)]
    metrics = trainer.evaluate()
    assert set(requests[1:]) == {(1, 4, True)}
    assert "eval_reward" in metrics
    assert not any("mismatch" in name for name in metrics)


UNSUPPORTED = {
    "use_vllm": {"use_vllm": True},
    "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "generation_kwargs": {"generation_kwargs": {"min_new_tokens": 3}},
    "cast_lm_head_to_fp32": {"cast_lm_head_to_fp32": True},
    "vespo": {"loss_type": "vespo"},
    "gspo with weight=token": {"importance_sampling_level": "sequence"},
    "steps_per_generation=4 ": {"steps_per_generation": 4, "others": {"correction": "sparse-rl-code"}},
    "dr_grpo with inner": {"loss_type": "dr_grpo", "others": {"correction": "sparse-rl-code"}},
    "one mask for both": {"beta": 0.1, "others": {"correction": Correction(weight="token", inner="accepted")}},
    "reroll.*alula train": {"others": {"correction": "reroll"}},
    "vetoed_in_baseline": {"others": {"correction": Correction(veto=1e-4, vetoed_in_baseline=False)}},
    "outer": {"others": {"correction": Correction(veto=1e-4, outer="accepted")}},
    "sparse-lr": {"others": {"correction": "sparse-lr"}},
    "rvk": {"others": {"sparsity": "rvk:16"}},
    "sparsity=5": {"others": {"sparsity": 5}},
    "correction=None": {"others": {"correction": None}},
    "kv_memory": {"others": {"engine": {"kv_memry": "1MiB"}}},
    "sparse_adapter": {"others": {"engine": {"sparse_adapter": "folder"}}},
    "block=32": {"others": {"sparsity": "block-topk:128,block=32", "engine": {"page": 16}}},
    "tools": {"others": {"tools": [reward]}},
    "rollout_func": {"others": {"rollout_func": reward}},
    "environment_factory": {"others": {"environment_factory": dict}},
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_unsupported_settings_raise(tmp_path, message):
    with pytest.raises(SettingError, match=message) as error:
        build_trainer(tmp_path, **UNSUPPORTED[message])
    assert "\n" not in str(error.value)


def test_unsupported_models_raise(tmp_path):
    peft = pytest.importorskip("peft")
    with pytest.raises(SettingError, match=r"PeftModel.*learner\.lora"):
        build_trainer(tmp_path, others={"peft_config": peft.LoraConfig(target_modules=["q_proj"])})
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = Gemma2Config(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    with pytest.raises(SettingError, match=r"Gemma2: .*sliding_attention"):
        build_trainer(tmp_path, model=Gemma2ForCausalLM(shape))


def test_alula_does_not_import_trl():
    code = "import sys, alula, alula.cli.main; sys.exit('trl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Groups split between processes, each with its own seed; the metrics cover all completions."""
    run_on_two_ranks(__file__, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert ranks[0]["tokens"] != ranks[1]["tokens"]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"]), "the processes hold different weights"
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    log_xi = torch.cat([rank["log_xi"] for rank in ranks])
    k3 = (log_xi.double().exp() - 1 - log_xi.double()).mean().item()
    assert ranks[0]["metrics"]["mismatch/kl_k3"] == pytest.approx(k3, rel=1e-5)
    p5 = torch.quantile(log_xi.double().exp(), 0.05).item()
    assert ranks[0]["metrics"]["mismatch/xi_p05"] == pytest.approx(p5, rel=1e-5)


def one_of_two_processes(out):
    trainer = build_trainer(out, num_generations=8, gradient_accumulation_steps=1, max_steps=1)
    batches, collect = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(collect(inputs)) or dict(batches[-1])
    dense = []
    score = trainer._dense_logprobs
    trainer._dense_logprobs = lambda batch: dense.append(score(batch)) or dense[-1]
    trainer.train()
    mask = batches[0]["completion_mask"].bool()
    results = {
        "tokens": batches[0]["completion_ids"].tolist(),
        "log_xi": (dense[0] - batches[0]["sampling_per_token_logps"])[mask],
        "weights": torch.cat([p.detach().flatten() for p in trainer.engine.model.parameters()]),
        "metrics": {k: v for k, v in trainer.state.log_history[0].items() if k.startswith(("mismatch/", "kv/"))},
    }
    torch.save(results, f"{out}/{trainer.accelerator.process_index}.pt")


if __name__ == "__main__":
    one_of_two_processes(sys.argv[1])

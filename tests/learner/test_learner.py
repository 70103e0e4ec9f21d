import copy
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from alula.errors import SettingError
from alula.learner.forward import checkpoint_activations
from alula.learner.learner import Learner, learning_rate
from alula.learner.optimizer import MasterAdamW
from alula.models.load import load_model, share_weights
from alula.settings import LearnerSettings, LoRASettings
from largest_tensor import LargestTensor

SHAPES = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral", "tiny-qwen3-moe"]


def tiny(shape="tiny-qwen3", dtype="float32", seed=0):
    return load_model(f"shape:{shape}", dtype=dtype, seed=seed).model


def sequences(count=7, seed=0, vocabulary=64, longest=12):
    rng = random.Random(seed)
    return [
        SimpleNamespace(
            prompt_ids=[rng.randrange(vocabulary) for _ in range(rng.randint(1, longest))],
            token_ids=[rng.randrange(vocabulary) for _ in range(rng.randint(1, longest))],
        )
        for _ in range(count)
    ]


def plain_logprobs(model, sequence, temperature):
    """One sequence, no packing, no chunks, transformers' own attention and head."""
    ids = torch.tensor([sequence.prompt_ids + sequence.token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    out = []
    for k, token in enumerate(sequence.token_ids):
        position = len(sequence.prompt_ids) + k - 1
        out.append((logits[position] / temperature).log_softmax(-1)[token])
    return torch.stack(out)


def plain_entropy(model, sequence, temperature):
    ids = torch.tensor([sequence.prompt_ids + sequence.token_ids])
    logp = (model(ids, use_cache=False).logits[0] / temperature).log_softmax(-1).detach()
    return -(logp.exp() * logp).sum(-1)[len(sequence.prompt_ids) - 1 : -1]


def weighted(coefficients):
    """A loss in which every token counts differently, so that any mix-up of order or shift shows."""

    def loss(logprobs, entropy, batch):
        weights = batch.flat(coefficients)
        return -(weights * logprobs.exp()).sum(), {
            "tokens": torch.tensor(len(logprobs)),
            "entropy": entropy.mean(),
        }

    return loss


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_and_chunked_equals_plain_transformers(shape, checkpointing):
    model = tiny(shape)
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("eager")
    rollouts = sequences()
    torch.manual_seed(0)
    coefficients = [torch.randn(len(r.token_ids)) for r in rollouts]
    config = LearnerSettings(
        lr=1e-3, token_budget=40, logprob_chunk=5, activation_checkpointing=checkpointing, max_grad_norm=None
    )
    learner = Learner(model, config)
    expected = [plain_logprobs(oracle, r, 0.8) for r in rollouts]
    for logprobs, wanted in zip(learner.score(rollouts, temperature=0.8), expected):
        torch.testing.assert_close(logprobs, wanted.detach(), atol=2e-6, rtol=1e-5)

    loss = -sum((c * p.exp()).sum() for c, p in zip(coefficients, expected))
    loss.backward()
    grads = capture_gradients(learner)
    forwards = 0

    def count(*_):
        nonlocal forwards
        forwards += 1

    learner.policy.layers[1].self_attn.register_forward_hook(count)
    result = learner.update(rollouts, weighted(coefficients), temperature=0.8)
    assert result.micro_batches > 1
    assert result.taken
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics["tokens"] == result.scored_tokens == sum(len(r.token_ids) for r in rollouts)
    entropies = torch.cat([plain_entropy(oracle, r, 0.8) for r in rollouts])
    assert result.metrics["entropy"] == pytest.approx(entropies.mean().item(), rel=1e-5)
    for logprobs, wanted in zip(result.logprobs, expected):
        torch.testing.assert_close(logprobs, wanted.detach(), atol=2e-6, rtol=1e-5)
    wanted_norm = torch.stack([p.grad.norm() for p in oracle.parameters()]).norm()
    assert result.grad_norm == pytest.approx(float(wanted_norm), rel=1e-5)
    for name, parameter in oracle.named_parameters():
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5 * largest, rtol=1e-5)
    assert forwards == (2 if checkpointing else 1) * result.micro_batches


def test_sliding_window_equals_transformers():
    model = tiny("tiny-mistral")
    model.config.sliding_window = 5
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("eager")
    rollouts = sequences(longest=20)
    full = Learner(tiny("tiny-mistral")).score(rollouts)
    scores = Learner(model).score(rollouts)
    for rollout, logprobs in zip(rollouts, scores):
        wanted = plain_logprobs(oracle, rollout, 1.0).detach()
        torch.testing.assert_close(logprobs, wanted, atol=2e-6, rtol=1e-5)
    assert any((a - b).abs().max() > 1e-4 for a, b in zip(scores, full))


def capture_gradients(learner):
    """The summed gradients as they are when the optimizer takes its step."""
    grads = {}
    step = learner.optimizer.adamw.step

    def look():
        grads.update({n: m.grad.clone() for n, m in learner.optimizer.masters.items() if m.grad is not None})
        return step()

    learner.optimizer.adamw.step = look
    return grads


def test_a_shift_by_one_token_would_show():
    """The comparison above can fail: the log-prob of the token itself in place of the next is far off."""
    learner, rollout = Learner(tiny()), sequences(1)[0]
    right = learner.score([rollout])[0]
    shifted = SimpleNamespace(
        prompt_ids=[*rollout.prompt_ids, rollout.token_ids[0]],
        token_ids=[*rollout.token_ids[1:], 0],
    )
    assert (learner.score([shifted])[0] - right).abs().max() > 1e-3


def test_no_full_logits_in_score_or_update():
    """64 sequences at once, 8 positions at a time: nothing larger than the model's own tensors exists."""
    model = tiny()
    rollouts = sequences(64, longest=30)
    coefficients = [torch.ones(len(r.token_ids)) for r in rollouts]
    learner = Learner(model, LearnerSettings(token_budget=100_000, logprob_chunk=8))
    vocabulary = model.config.vocab_size
    scored = sum(len(r.token_ids) for r in rollouts)
    with LargestTensor() as largest:
        learner.score(rollouts)
        result = learner.update(rollouts, weighted(coefficients))
    assert result.micro_batches == 1
    parameter = max(p.numel() for p in model.parameters())
    activations = sum(len(r.prompt_ids) + len(r.token_ids) for r in rollouts) * model.config.intermediate_size
    assert largest.elements <= max(parameter, activations, 8 * vocabulary)
    assert largest.elements < scored * vocabulary


@pytest.mark.parametrize("clip", [None, 0.05])
def test_float32_steps_are_bit_equal_to_torch_adamw(clip):
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    theirs = copy.deepcopy(ours)
    optimizer = MasterAdamW(ours.named_parameters(), lr=1e-2, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(5):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for _ in range(2):
            ours(x).square().sum().backward()
            theirs(x).square().sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        reference.step()
        reference.zero_grad()
        optimizer.step(1e-2, clip)
        for a, b in zip(ours.parameters(), theirs.parameters()):
            assert torch.equal(a, b)
            assert a.grad is None


def test_newest_optimizer_receives_the_gradients():
    """A warm-up in two stages makes a learner for each, on the same half-precision parameters."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    first, second = (MasterAdamW([("w", parameter)], lr=lr, compute=torch.bfloat16) for lr in (1.0, 0.5))
    second.backward((parameter * 2).sum())
    norm, taken = second.step(lr=0.5)
    assert taken
    assert norm == pytest.approx(2 * 3**0.5)
    assert first.masters["w"].grad is None
    learned = torch.full((3,), 0.5, dtype=torch.bfloat16)
    assert torch.equal(parameter, learned)
    for late in (lambda: first.backward(parameter.sum()), lambda: first.step(lr=1.0), first.publish):
        with pytest.raises(SettingError, match="newer learner"):
            late()
    assert torch.equal(parameter, learned)
    pickle.dumps(parameter)


def test_layers_with_dropout_raise():
    """Recomputed layers run in training mode, so dropout would change their output."""
    config = OPTConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, ffn_dim=8, num_attention_heads=1, dropout=0.1)
    with pytest.raises(SettingError, match=r"OPTDecoderLayer .*dropout=0\.1"):
        checkpoint_activations(OPTForCausalLM(config).eval())
    config.dropout = 0.0
    checkpoint_activations(OPTForCausalLM(config).eval())


def test_bfloat16_parameters_follow_float32_masters():
    """Updates far below bfloat16's resolution still add up, gradients add up in float32, none is left behind."""
    parameter = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    twin = torch.nn.Parameter(torch.ones(16))
    optimizer = MasterAdamW([("w", parameter)], lr=1e-5)
    reference = torch.optim.AdamW([twin], lr=1e-5, weight_decay=0.0)
    for _ in range(300):
        (parameter.float() * 1.0).sum().backward()
        assert parameter.grad is None
        for _ in range(8):
            (parameter.float() * 2.0**-10).sum().backward()
        assert torch.equal(optimizer.masters["w"].grad, torch.full((16,), 1 + 8 * 2.0**-10))
        twin.grad = torch.full((16,), 1 + 8 * 2.0**-10)
        optimizer.step(1e-5)
        reference.step()
    assert torch.equal(optimizer.masters["w"], twin)
    assert torch.equal(parameter, twin.bfloat16())
    assert parameter[0] < 1


def test_float16_keeps_gradients_that_its_range_would_lose():
    """A loss as small as a mean over a million tokens: float32's step, where float16 gradients alone are all zero."""
    rollouts = sequences()
    loss = weighted([torch.full((len(r.token_ids),), 1e-6) for r in rollouts])
    norms, moved = {}, {}
    for dtype in ("float32", "float16"):
        learner = Learner(tiny(dtype=dtype), LearnerSettings(lr=1e-2, eps=1e-16, max_grad_norm=None, token_budget=40))
        before = {name: master.clone() for name, master in learner.optimizer.masters.items()}
        norms[dtype] = learner.update(rollouts, loss).grad_norm
        moved[dtype] = torch.cat([(m - before[n]).flatten() for n, m in learner.optimizer.masters.items()]).detach()
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.01)
    assert torch.cosine_similarity(moved["float16"], moved["float32"], dim=0) > 0.95
    unscaled = Learner(tiny(dtype="float16"), LearnerSettings(token_budget=40))
    unscaled.optimizer.scale = None
    assert unscaled.update(rollouts, loss).grad_norm < 0.5 * norms["float32"]


@pytest.mark.slow
def test_float16_overflow_skips_the_step_and_lowers_the_scale():
    learner, rollouts = Learner(tiny(dtype="float16"), LearnerSettings(lr=1e-3)), sequences()
    before = {name: t.clone() for name, t in learner.tensors().items()}
    huge = weighted([torch.full((len(r.token_ids),), 1e5) for r in rollouts])
    taken = [learner.update(rollouts, huge).taken for _ in range(2)]
    assert taken == [False, False]
    scale = learner.tensors()["optimizer.loss_scale"]
    assert scale.tolist() == [2.0**8, 0.0]
    for name, tensor in learner.tensors().items():
        assert tensor is scale or torch.equal(tensor, before[name]), name
    good = weighted([torch.full((len(r.token_ids),), 1e-3) for r in rollouts])
    assert all(learner.update(rollouts, good).taken for _ in range(50))
    assert scale.tolist() == [2.0**9, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_step_without_rollouts_changes_nothing(dtype):
    """Every rollout of a step may be rejected: there is no gradient then."""
    learner = Learner(tiny(dtype=dtype), LearnerSettings(lr=1e-2))
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    update = learner.update([], weighted([]))
    assert (update.grad_norm, update.taken) == (0.0, True)
    assert all(torch.equal(p, before[name]) for name, p in learner.model.named_parameters())


def test_engine_shares_the_trained_parameters():
    model = tiny(dtype="bfloat16")
    engine = share_weights(model)
    learner, rollouts = Learner(model, LearnerSettings(lr=1e-2)), sequences()
    before = {name: p.clone() for name, p in engine.named_parameters()}
    learner.update(rollouts, weighted([torch.ones(len(r.token_ids)) for r in rollouts]))
    changed = [not torch.equal(p, before[name]) for name, p in engine.named_parameters()]
    assert all(changed)
    assert engine.config._attn_implementation != learner.model.config._attn_implementation


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(poison):
    learner, rollouts = Learner(tiny(), LearnerSettings(lr=1e-2, token_budget=40)), sequences()
    good = weighted([torch.ones(len(r.token_ids)) for r in rollouts])
    learner.update(rollouts, good)
    before = {name: t.clone() for name, t in learner.tensors().items()}

    def bad(logprobs, entropy, batch):
        loss, metrics = good(logprobs, entropy, batch)
        if 0 in batch.index:
            # the square root's slope at zero is infinite, its value is not
            loss = loss * float("nan") if poison == "loss" else loss + (logprobs * 0).sqrt().sum()
        return loss, metrics

    result = learner.update(rollouts, bad)
    assert not result.taken
    assert (learner.steps, learner.skipped) == (2, 1)
    for name, tensor in learner.tensors().items():
        assert torch.equal(tensor, before[name]), name
    assert learner.update(rollouts, good).taken


def test_the_loss_falls():
    learner, rollouts = Learner(tiny(), LearnerSettings(lr=3e-3, token_budget=60)), sequences()
    loss = weighted([torch.ones(len(r.token_ids)) for r in rollouts])
    losses = [learner.update(rollouts, loss).loss for _ in range(15)]
    assert losses[-1] < 3 * losses[0] < 0


def test_a_loss_without_gradient_and_rollouts_without_tokens():
    learner, rollouts = Learner(tiny()), sequences(3)
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    result = learner.update(rollouts, lambda logprobs, entropy, batch: (torch.tensor(0.0), {}))
    assert (result.loss, result.grad_norm, result.taken) == (0.0, 0.0, True)
    empty = [SimpleNamespace(prompt_ids=[1, 2], token_ids=[])]
    assert learner.update(empty, weighted([torch.empty(0)])).micro_batches == 0
    assert learner.score(empty)[0].shape == (0,)
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, before[name])


def test_reference_stays_what_training_began_with():
    for settings, kept in (({}, True), ({"lora": LoRASettings(rank=4, alpha=8)}, False)):
        learner = Learner(tiny(), LearnerSettings(lr=1e-2, **settings), keep_reference=kept)
        rollouts = sequences()
        before = learner.score(rollouts)
        learner.update(rollouts, weighted([torch.ones(len(r.token_ids)) for r in rollouts]))
        reference, after = learner.score(rollouts, reference=True), learner.score(rollouts)
        for a, b, c in zip(before, reference, after):
            assert torch.equal(a, b)
            assert not torch.equal(a, c)
    with pytest.raises(SettingError, match=r"reference=True: .*objective\.kl"):
        Learner(tiny()).score(rollouts, reference=True)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2"])
def test_lora_trains_adapters_only_and_merges_into_plain_weights(shape):
    model = tiny(shape)
    original = copy.deepcopy(model)
    learner = Learner(model, LearnerSettings(lr=1e-2, lora=LoRASettings(rank=3, alpha=6)))
    rollouts = sequences()
    torch.testing.assert_close(learner.score(rollouts)[0], plain_logprobs(original, rollouts[0], 1.0).detach())
    for _ in range(2):
        learner.update(rollouts, weighted([torch.ones(len(r.token_ids)) for r in rollouts]))
    assert all("lora_" in name for name in learner.optimizer.parameters)
    merged = dict(learner.full_parameters())
    assert merged.keys() == dict(original.named_parameters()).keys()
    plain = copy.deepcopy(original)
    plain.load_state_dict(merged, strict=False)
    for rollout, scores in zip(rollouts, learner.score(rollouts)):
        expected = plain_logprobs(plain, rollout, 1.0).detach()
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
        assert (expected - plain_logprobs(original, rollout, 1.0)).abs().max() > 1e-4


@pytest.mark.slow
def test_one_compiled_layer_serves_all_layers_and_micro_batches(monkeypatch):
    """Attention is one opaque operation on CUDA; here a traceable stand-in, since the CPU's loop is not."""

    def stand_in(query, key, value, cu_seqlens, max_seqlen, scaling, window=None, one_by_one=None):
        return query * key.mean() * scaling + value.mean() + cu_seqlens.sum() * 0

    monkeypatch.setattr("alula.learner.forward.packed_attention", stand_in)
    torch._dynamo.reset()
    eager, learner = (
        Learner(tiny(), LearnerSettings(activation_checkpointing=False, token_budget=60)) for _ in range(2)
    )
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in learner.policy.layers:
        layer.compile(dynamic=True, backend=count, fullgraph=True)
    for seed in (0, 5):
        rollouts = sequences(9, seed=seed)
        for a, b in zip(learner.score(rollouts), eager.score(rollouts)):
            torch.testing.assert_close(a, b)
        learner.update(rollouts, weighted([torch.ones(len(r.token_ids)) for r in rollouts]))
        eager.update(rollouts, weighted([torch.ones(len(r.token_ids)) for r in rollouts]))
    assert len(graphs) == 2  # one without gradient, one with


def test_learning_rate_by_hand():
    rates = [learning_rate(s, 1.0, warmup=4, total=12, decay="linear", floor=0.2) for s in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.6)
    assert rates[12] == rates[13] == pytest.approx(0.2)
    cosine = [learning_rate(s, 2.0, total=10, decay="cosine") for s in range(12)]
    assert cosine[0] == 2.0
    assert cosine[5] == pytest.approx(1.0)
    assert cosine[10] == cosine[11] == pytest.approx(0.0)
    assert learning_rate(1000, 3.0, warmup=2) == 3.0


def test_invalid_settings_raise():
    with pytest.raises(SettingError, match=r"decay='cosin': .*'cosine'"):
        LearnerSettings(decay="cosin")
    with pytest.raises(SettingError, match="'lrr'; did you mean 'lr'"):
        LearnerSettings(lrr=1)
    with pytest.raises(SettingError, match=r"decay=linear .*warmup_steps=5.* 5"):
        Learner(tiny(), LearnerSettings(decay="linear", warmup_steps=5), total_steps=5)
    for name, value in (("max_grad_norm", 0), ("lr", 0), ("betas", (1.0, 0.9)), ("eps", 0), ("weight_decay", -1)):
        with pytest.raises(SettingError, match=f"setting {name}"):
            LearnerSettings(**{name: value})
    with pytest.raises(SettingError, match=r"lora\.rank=0"):
        LearnerSettings(lora={"rank": 0})


def test_flops_by_hand():
    model = tiny("tiny-qwen2")
    c = model.config
    learner = Learner(model)
    rollout = SimpleNamespace(prompt_ids=[1] * 5, token_ids=[1] * 3)
    flops = learner.flops([rollout])
    head_dim = c.head_dim if getattr(c, "head_dim", None) else c.hidden_size // c.num_attention_heads
    q, kv = c.num_attention_heads * head_dim, c.num_key_value_heads * head_dim
    layer = c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size) + q + 2 * kv + 2 * c.hidden_size
    assert flops.layers == 6 * 8 * (c.num_hidden_layers * layer + c.hidden_size)
    assert flops.attention == 6 * c.num_hidden_layers * q * 64
    assert flops.head == 6 * c.hidden_size * c.vocab_size * 3
    assert flops.total == flops.layers + flops.attention + flops.head

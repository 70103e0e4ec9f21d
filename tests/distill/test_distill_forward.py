"""The sparse forward of the learner: its log-probs against the engine's, its gradient against plain attention with full
masks."""

import copy
import gc
from itertools import zip_longest

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.func import functional_call

import oracle
from alula import Engine, Evict, Rollout, Sampling, Schedule, Select, Sparsity
from alula.distill.attention.attention import kernel_attention, masked_attention, sparse_attention
from alula.distill.attention.page_choice import choose, pages_read
from alula.distill.attention.tiles import layer_visibility
from alula.distill.attention.visibility import Visibility
from alula.distill.distiller import Distiller
from alula.errors import SettingError
from alula.learner.learner import Learner
from alula.learner.packing import collate
from alula.models.load import load_model
from alula.models.lora import Adapter, init_adapter
from alula.settings import DistillSettings
from alula.sparsity.evict import METHODS as EVICTORS
from largest_tensor import LargestTensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [list(range(5, 12)), [3, 4, 5], [9, 8] * 13, [7]]
"""The third is longer than every small budget here."""
SAMPLING = Sampling(n=2, max_new_tokens=26, temperature=0.8, ignore_eos=True)
SMALL = {"budget": 10, "buffer": 4, "window": 3, "sinks": 2}

METHODS = {name: Sparsity(Evict(name, **SMALL)) for name in EVICTORS} | {
    name: Sparsity(select=Select(name, 16, block=4, dense_layers=1)) for name in ("block-topk", "quest")
}
VARIANTS = {
    "evict, growing schedule": Sparsity(Evict("rkv", Schedule((8, 12, 20), width=13), buffer=3, window=3, sinks=1)),
    "evict, shrinking schedule": Sparsity(Evict("snapkv", Schedule((20, 9), width=20), buffer=3, window=3, sinks=1)),
    "evict, prompt protected": Sparsity(Evict("snapkv", **SMALL, protect_prompt=True)),
    "evict, every step": Sparsity(Evict("rkv", 9, buffer=1, window=3, sinks=0)),
    "select, growing schedule": Sparsity(select=Select("block-topk", Schedule((12, 16, 24), width=13), 4, 1)),
    "select, shrinking schedule": Sparsity(select=Select("quest", Schedule((24, 16, 12), width=12), 4, 0)),
    "select, budget between blocks": Sparsity(select=Select("block-topk", 14, block=4, dense_layers=2)),
    "select, only what is always read": Sparsity(select=Select("quest", 12, block=4, dense_layers=0)),
}


@pytest.fixture(scope="module")
def models():
    return {group: oracle.custom_model(group) for group in (1, 3, 4, 7)}


def engine_of(loaded, **options):
    return Engine(loaded, **({"page": 4, "kv_memory": "2MiB", "max_rows": 16, "lookahead": 3} | options))


def random_adapter(model, size=0.3, rank=3, targets=("all",), seed=5) -> Adapter:
    adapter = init_adapter(model, rank, 2.0 * rank, targets, seed)
    generator = torch.Generator().manual_seed(seed)
    for _, b in adapter.weights.values():
        b.copy_(size * torch.randn(b.shape, generator=generator) / b.shape[1])
    return adapter


def distiller_of(model, adapter=None, **settings) -> Distiller:
    settings = {"activation_checkpointing": False, "token_budget": 120, "chunk": 11} | settings
    return Distiller(model, DistillSettings(**settings), adapter=adapter)


def worst(distiller, rollouts) -> float:
    scores = distiller.score(rollouts)
    return max((mine - r.logprobs).abs().max().item() for mine, r in zip(scores, rollouts))


def is_sparse(distiller, rollouts) -> bool:
    return distiller.measure(rollouts).mean < 0.99


# --- the same policy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_reproduces_the_engines_logprobs(method, models):
    loaded, policy = models[3], METHODS[method]
    for adapter in (None, random_adapter(loaded.model)):
        rollouts = engine_of(loaded, sparse_adapter=adapter).generate(
            PROMPTS, SAMPLING, policy, record=policy.evict is not None
        )
        distiller = distiller_of(loaded.model, adapter)
        assert worst(distiller, rollouts) < 1e-4
        assert is_sparse(distiller, rollouts)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.slow
def test_variants_reproduce_the_engines_logprobs(name, models):
    loaded, policy = models[4], VARIANTS[name]
    adapter = random_adapter(loaded.model)
    engine = engine_of(loaded, sparse_adapter=adapter, lookahead=7)
    rollouts = engine.generate(PROMPTS, SAMPLING, policy, record=policy.evict is not None)
    distiller = distiller_of(loaded.model, adapter)
    assert worst(distiller, rollouts) < 1e-4
    assert is_sparse(distiller, rollouts)


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("method", ["rkv", "block-topk", "quest"])
@pytest.mark.slow
def test_any_group_size(group, method, models):
    loaded, policy = models[group], METHODS[method]
    rollouts = engine_of(loaded).generate(PROMPTS, SAMPLING, policy, record=policy.evict is not None)
    assert worst(distiller_of(loaded.model), rollouts) < 1e-4


@pytest.mark.parametrize("method", ["snapkv", "block-topk"])
@pytest.mark.slow
def test_every_model_family(method, tiny):
    policy, adapter = METHODS[method], random_adapter(tiny.model, targets=("q_proj", "v_proj", "down_proj"))
    rollouts = engine_of(tiny, sparse_adapter=adapter).generate(
        PROMPTS, SAMPLING, policy, record=policy.evict is not None
    )
    distiller = distiller_of(tiny.model, adapter)
    assert worst(distiller, rollouts) < 1e-4
    assert is_sparse(distiller, rollouts)


def test_rollouts_of_different_policies_share_a_micro_batch(models):
    policies = [METHODS["rkv"], METHODS["block-topk"], VARIANTS["select, budget between blocks"], Sparsity()]
    policies[2] = Sparsity(select=Select("block-topk", 20, block=4, dense_layers=1))
    rollouts = engine_of(models[3]).generate(PROMPTS, SAMPLING, policies, record=[True, False, False, False])
    assert [r.history is not None for r in rollouts] == [True] * 2 + [False] * 6
    distiller = distiller_of(models[3].model, token_budget=10_000)
    assert worst(distiller, rollouts) < 1e-4


@pytest.mark.slow
def test_measured_acceptance_is_the_engines(models):
    loaded = models[3]
    adapter = random_adapter(loaded.model)
    engine, distiller = engine_of(loaded, sparse_adapter=adapter), distiller_of(loaded.model, adapter)
    for method in ("rkv", "block-topk"):
        rollouts = engine.generate(PROMPTS, SAMPLING, METHODS[method], record=True)
        measured = distiller.measure(rollouts)
        expected = torch.cat(engine.acceptance(rollouts, METHODS[method]))
        torch.testing.assert_close(torch.from_numpy(measured.alpha), expected, rtol=0, atol=1e-4)
        assert measured.positions.tolist() == [len(r.prompt_ids) + i for r in rollouts for i in range(len(r))]
        assert measured.prompts.tolist() == [r.prompt_index for r in rollouts for _ in range(len(r))]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.slow
def test_bfloat16_stays_close(adapted):
    loaded = load_model("shape:tiny-llama", dtype="bfloat16")
    adapter = random_adapter(loaded.model, size=0.1) if adapted else None
    engine = engine_of(loaded, sparse_adapter=adapter)
    for policy in METHODS.values():
        rollouts = engine.generate(PROMPTS, SAMPLING, policy, record=policy.evict is not None)
        scores = distiller_of(loaded.model, adapter).score(rollouts)
        gap = torch.cat([mine - r.logprobs for mine, r in zip(scores, rollouts)]).abs()
        assert gap.mean() < 0.02, policy.describe()


# --- its gradient -----------------------------------------------------------------------------------------------


def reference_gradient(model, rollout, adapter, coefficients) -> dict[str, torch.Tensor]:
    """Plain transformers with masks over all keys, the adapter as W + scale · B A, autograd."""
    model = copy.deepcopy(model)
    leaves, merged = {}, {}
    for name, (a, b) in adapter.weights.items():
        leaves[f"{name}.lora_A"], leaves[f"{name}.lora_B"] = (x.clone().requires_grad_() for x in (a, b))
        delta = leaves[f"{name}.lora_B"] @ leaves[f"{name}.lora_A"]
        merged[f"{name}.weight"] = model.get_submodule(name).weight.detach() + adapter.scale * delta
    config = model.config
    visible = oracle.visible_keys(rollout, config.num_hidden_layers, config.num_key_value_heads, 4)
    now = oracle.Pass(visible)
    oracle._pass.append(now)
    with oracle.attention(model, "oracle"):
        ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        logits = functional_call(model, merged, (ids,), {"use_cache": False}).logits[0]
    oracle._pass.pop()
    now.logits = logits
    (oracle.logprobs(now, rollout) * coefficients).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["rkv", "streaming", "block-topk", "quest"])
@pytest.mark.slow
def test_gradient_is_that_of_plain_masked_attention(method, checkpointing, models):
    loaded = models[3]
    adapter = random_adapter(loaded.model)
    engine = engine_of(loaded, sparse_adapter=adapter)
    rollouts = engine.generate(PROMPTS, SAMPLING, METHODS[method], record=True)[1::2]
    torch.manual_seed(0)
    coefficients = [torch.randn(len(r)) for r in rollouts]
    expected: dict[str, torch.Tensor] = {}
    for rollout, wanted in zip(rollouts, coefficients):
        for name, gradient in reference_gradient(loaded.model, rollout, adapter, wanted).items():
            expected[name] = expected.get(name, 0) + gradient
    distiller = distiller_of(loaded.model, adapter, activation_checkpointing=checkpointing)
    batch = collate(rollouts, range(len(rollouts)))
    with distiller.policy.dense_frozen():
        hidden = distiller.policy(batch, rollouts)
        logits = hidden @ distiller.policy.head[0].T / SAMPLING.temperature
        logprobs = logits.log_softmax(-1).gather(-1, batch.target_ids[:, None])[:, 0]
        (logprobs * batch.flat(coefficients)).sum().backward()
    for name, parameter in distiller.policy.adapter_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4)
    assert all(p.grad is None for p in loaded.model.parameters())
    assert all(p.requires_grad for p in loaded.model.parameters())


def packed_case(*policies: Sparsity, lengths=((3, 30), (9, 11), (1, 24)), heads=6, kv_heads=2, dim=5):
    """Random q, k, v and a random history: `Visibility` alone, without a model.

    The last policy holds for further rows."""
    torch.manual_seed(1)
    rollouts = []
    for (prompt, response), policy in zip_longest(lengths, policies, fillvalue=policies[-1]):
        history = None
        if policy.evict:
            total = prompt + response
            history = torch.arange(total)[None, None] + torch.randint(1, 12, (2, kv_heads, total))
        rollouts.append(Rollout([0] * prompt, [0] * response, None, "length", sparsity=policy, history=history))
    total = sum(sum(pair) for pair in lengths)
    q, k, v = (torch.randn(total, h, dim, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    return rollouts, q, k, v


@pytest.mark.parametrize("policy", [METHODS["rkv"], METHODS["block-topk"], VARIANTS["select, shrinking schedule"]])
def test_chunks_of_queries_change_nothing(policy):
    rollouts, q, k, v = packed_case(policy)
    visibility = Visibility.of(rollouts, "cpu")
    upstream = torch.randn(q.shape)
    results = []
    for elements in (1 << 20, 3 * 6 * 33 * 5, 1):
        out = sparse_attention(q, k, v, visibility, 1, 0.4, mask_elements=elements)
        results.append((out, *torch.autograd.grad((out * upstream).sum(), (q, k, v))))
    for other in results[1:]:
        for chunked, expected in zip(other, results[0]):
            torch.testing.assert_close(chunked, expected, rtol=1e-5, atol=1e-6)


KERNEL_CASES = {
    "evictor": [METHODS["rkv"]],
    "selector": [METHODS["block-topk"]],
    "schedule": [VARIANTS["select, shrinking schedule"]],
    "evictor and selector": [METHODS["rkv"], METHODS["block-topk"]],
    "pages across tiles": [Sparsity(select=Select("block-topk", 9, block=3, dense_layers=1))],
    "two words to a tile": [Sparsity(select=Select("quest", 7, block=1, dense_layers=1))],
    "a page to a tile": [Sparsity(select=Select("block-topk", 192, block=64, dense_layers=1))],
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.slow
def test_the_kernel_is_the_chunked_reference(name):
    lengths = ((3, 259), (9, 1)) if name == "a page to a tile" else ((3, 66), (66, 4), (9, 1))
    rollouts, *tensors = packed_case(*KERNEL_CASES[name], lengths=lengths, heads=4)
    q, k, v = (x.detach().to(DEVICE).requires_grad_() for x in tensors)
    visibility = Visibility.of(rollouts, DEVICE)
    upstream = torch.randn(q.shape, device=DEVICE)
    results = []
    for attention in (sparse_attention, kernel_attention):
        out = attention(q, k, v, visibility, 1, 0.4)
        results.append((out, *torch.autograd.grad((out * upstream).sum(), (q, k, v))))
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def as_bits(words: torch.Tensor) -> torch.Tensor:
    """[Hkv, words, T] -> bool [T, Hkv, 32 · words]"""
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    return bits.bool().permute(2, 0, 1, 3).flatten(2)


@pytest.mark.kernels
@pytest.mark.slow
def test_pages_are_chosen_as_the_reference_chooses_them():
    """Bit for bit, from the same scores: over two words, under a schedule and without a budget, in the prompt too."""
    budgets = (Schedule((6, 11, 20), width=25), 8, 200)
    policies = [Sparsity(select=Select("block-topk", budget, block=2, dense_layers=1)) for budget in budgets]
    rollouts, *_ = packed_case(*policies, Sparsity(), lengths=((3, 66), (20, 3), (1, 12), (2, 6)))
    visibility = Visibility.of(rollouts, DEVICE)
    pages, at = -(-visibility.width // 2), torch.arange(visibility.width, device=DEVICE)
    scores = torch.randn(visibility.rows, 2, visibility.width, visibility.width // 2)
    draw, kind = torch.rand(scores.shape), torch.arange(visibility.width)[:, None] % 5
    scores = torch.where(kind == 1, scores.round(), scores)
    scores = torch.where((kind == 2) & (draw < 0.8), torch.nan, scores)
    scores = torch.where((kind == 3) & (scores.abs() > 1), scores * torch.inf, scores)
    scores = torch.where(kind == 4, torch.where(draw < 0.5, 0.0, -0.0), scores).to(DEVICE)
    words = torch.full((2, 2, len(visibility.position)), -1, dtype=torch.int32, device=DEVICE)
    for first in range(0, visibility.width, 37):
        choose(visibility, scores[:, :, first : first + 37].contiguous(), first, words)
    held = torch.arange(pages, device=DEVICE) <= at[:, None] // 2
    read = torch.where(
        (at < visibility.prompts[:, None])[:, None, :, None], held, visibility.pages_read(scores, at, pages)
    )
    chosen = as_bits(words)
    assert torch.equal(chosen[..., :pages], visibility.unpad(read.transpose(1, 2)))
    assert not chosen[..., pages:].any()


@pytest.mark.kernels
@pytest.mark.parametrize("policy", [METHODS["block-topk"], METHODS["quest"]])
@pytest.mark.slow
def test_pages_read_do_not_depend_on_chunks(policy):
    rollouts, *tensors = packed_case(policy, lengths=((3, 20), (9, 2)))
    q, k, _ = (x.detach().to(DEVICE) for x in tensors)
    visibility = Visibility.of(rollouts, DEVICE)
    assert torch.equal(pages_read(visibility, 1, q, k), pages_read(visibility, 1, q, k, score_elements=1))


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["evictor", "evictor and selector", "a page to a tile"])
@pytest.mark.slow
def test_only_tiles_with_visible_keys_are_visited(name):
    lengths = ((3, 259), (100, 30)) if name == "a page to a tile" else ((3, 140), (9, 1), (70, 65))
    rollouts, *tensors = packed_case(*KERNEL_CASES[name], lengths=lengths)
    q, k, _ = (x.detach().to(DEVICE) for x in tensors)
    visibility = Visibility.of(rollouts, DEVICE)
    _, lists = layer_visibility(visibility, 1, q, k)
    padded = visibility.pad(k).transpose(1, 2)
    mask = (
        visibility.visible(1, visibility.pad(q).transpose(1, 2), 0, visibility.summaries(1, padded))
        .expand(-1, 2, -1, -1)
        .clone()
    )
    for row, rollout in enumerate(rollouts):
        mask[row, :, len(rollout.prompt_ids) + len(rollout) :] = False
    room = -mask.shape[-1] % 64
    some = F.pad(mask, (0, room, 0, room)).unflatten(3, (-1, 64)).unflatten(2, (-1, 64)).any(5).any(3)
    assert (~some[0] & torch.ones_like(some[0]).tril()).any(), "there is something to skip"
    for (tiles, counts), expected in ((lists[:2], some), (lists[2:], some.transpose(2, 3))):
        assert torch.equal(counts, expected.sum(-1))
        for row, head, block in expected.any(-1).nonzero().tolist():
            visited = tiles[row, head, block, : counts[row, head, block]]
            assert torch.equal(visited, expected[row, head, block].nonzero()[:, 0].int())
    assert layer_visibility(visibility, 1, q, k)[1] is lists, "a layer that is computed again looks no more"


@pytest.mark.kernels
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.slow
def test_a_step_through_the_kernel_is_the_same(checkpointing, models, monkeypatch):
    loaded = models[3]
    adapter = random_adapter(loaded.model)
    rollouts = engine_of(loaded).generate(PROMPTS, SAMPLING, METHODS["quest"])[2:4]
    found = []
    for device, on in (("cpu", "0"), (DEVICE, "1")):
        monkeypatch.setenv("ALULA_TRITON_INTERPRET", on)
        model = copy.deepcopy(loaded.model).to(device)
        distiller = distiller_of(model, adapter, activation_checkpointing=checkpointing)
        metrics = distiller.step(rollouts)
        found.append((metrics["kl"], metrics["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.slow
def test_one_compiled_layer_serves_all_and_changes_nothing(kernels, models, monkeypatch):
    """Through dynamo and autograd's own graphs; the compiler behind them is left out to save its time. The eager one
    never runs through the kernels. Prompts with an evictor and with a selector take turns."""
    loaded, graphs = models[1], []

    def both():
        for distiller in (eager, compiled):
            monkeypatch.setenv("ALULA_TRITON_INTERPRET", "1" if kernels and distiller is compiled else "0")
            yield distiller

    def counted(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **o: compile_(module, backend=counted, **o))
    torch._dynamo.reset()
    adapter = random_adapter(loaded.model)
    engine = engine_of(loaded, sparse_adapter=adapter)
    policies = [METHODS["rkv"], METHODS["block-topk"]] * 2
    rollouts = engine.generate(PROMPTS, SAMPLING, policies, record=[policy.evict is not None for policy in policies])
    eager, compiled = (
        distiller_of(loaded.model, adapter, lr=1e-2, activation_checkpointing=True, compile=on) for on in (False, True)
    )
    found = []
    for some in (rollouts[:2], rollouts[1:4]):
        for distiller in both():
            metrics = distiller.step(some)
            found.append((metrics["kl"], metrics["grad_norm"], distiller.measure(some).mean))
        counts = len(graphs)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[3] == pytest.approx(found[2], rel=1e-4)
    for (_, mine), (_, other) in zip(compiled.policy.adapter_parameters(), eager.policy.adapter_parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    gradients = []
    for distiller in both():
        with distiller.policy.dense_frozen():  # another forward pass comes before the backward one
            hidden, _ = (distiller.policy(collate(rollouts, some), rollouts) for some in ([4, 0], [2, 3]))
            gc.collect()
            parameters = [parameter for _, parameter in distiller.policy.adapter_parameters()]
            gradients.append(torch.autograd.grad(hidden.square().sum(), parameters))
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=5e-3)  # of values up to 5, at nearly the same parameters
    compiled.step(rollouts[5:])
    assert 0 < len(graphs) == counts
    assert kernels or counts <= 10 * 4, "few variants of each piece, for all layers"
    unbroken = [graph for graph in graphs if "sparse_attention" in graph.code]  # otherwise it breaks at the attention
    assert len(unbroken) == (2 if kernels else 0), "one with a gradient and one without, for all layers"


def test_no_whole_mask_exists_when_chunked():
    rollouts, q, k, v = packed_case(METHODS["block-topk"], lengths=((2, 198),))
    with LargestTensor() as largest:
        sparse_attention(q, k, v, Visibility.of(rollouts, "cpu"), 1, 0.4, mask_elements=6 * 200 * 10).sum().backward()
    assert largest.elements < 6 * 200 * 200 / 8


def test_masked_attention_of_a_group_is_per_head():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 5), torch.randn(2, 2, 9, 5), torch.randn(2, 2, 9, 5)
    visible = torch.rand(2, 2, 4, 9) < 0.5
    visible[..., 0] = True
    out = masked_attention(q, k, v, visible, 0.7)
    for b in range(2):
        for h in range(6):
            logits = (0.7 * q[b, h] @ k[b, h // 3].T).masked_fill(~visible[b, h // 3], -torch.inf)
            torch.testing.assert_close(out[b, h], logits.softmax(-1) @ v[b, h // 3])


# --- φ belongs to the sparse policy only ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rkv", "block-topk"])
@pytest.mark.slow
def test_an_adapter_of_zeros_changes_nothing_bit_for_bit(method, models):
    loaded, policy = models[3], METHODS[method]
    plain, zero = engine_of(loaded), engine_of(loaded, sparse_adapter=init_adapter(loaded.model, 4, 8.0, ["all"], 0))
    for one, other in zip(plain.generate(PROMPTS, SAMPLING, policy), zero.generate(PROMPTS, SAMPLING, policy)):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.logprobs, other.logprobs)
    rollouts = plain.generate(PROMPTS, SAMPLING, policy, record=True)
    zeros, none = distiller_of(loaded.model), distiller_of(loaded.model)
    for name, layer in none.policy.layers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(none.policy.model.get_submodule(parent), leaf, layer.base)
    assert all(torch.equal(a, b) for a, b in zip(zeros.score(rollouts), none.score(rollouts)))


def test_the_dense_policy_never_sees_the_adapter(models):
    loaded = copy.deepcopy(models[3])
    adapter = random_adapter(loaded.model, size=2.0)
    plain, adapted = engine_of(loaded), engine_of(loaded, sparse_adapter=adapter)
    dense = plain.generate(PROMPTS, SAMPLING)
    for one, other in zip(dense, adapted.generate(PROMPTS, SAMPLING)):
        assert one.token_ids == other.token_ids
        assert torch.equal(one.logprobs, other.logprobs)
    for one, other in zip(plain.score(dense), adapted.score(dense)):
        assert torch.equal(one.logprobs, other.logprobs)
    sparse = plain.score(dense, METHODS["rkv"]), adapted.score(dense, METHODS["rkv"])
    assert max((a.logprobs - b.logprobs).abs().max() for a, b in zip(*sparse)) > 0.1, "the sparse policy does"

    before = {name: p.clone() for name, p in loaded.model.named_parameters()}
    distiller = distiller_of(loaded.model, adapter)
    learner = Learner(loaded.model)
    scores = learner.score(dense, 0.8)
    batch = collate(dense, range(len(dense)))
    with torch.no_grad():
        logits = distiller.policy.dense(batch) @ distiller.policy.head[0].T / 0.8
        expected = logits.log_softmax(-1).gather(-1, batch.target_ids[:, None])[:, 0]
    torch.testing.assert_close(expected, torch.cat(scores), rtol=0, atol=2e-6)
    assert all(torch.equal(before[name], p) for name, p in loaded.model.named_parameters())


@pytest.mark.slow
def test_the_engine_takes_new_adapters_and_weights_in_place(models, tmp_path):
    loaded = copy.deepcopy(models[3])
    first, second = random_adapter(loaded.model, seed=1), random_adapter(loaded.model, seed=2)
    engine = engine_of(loaded, sparse_adapter=first)
    addresses = [p.data_ptr() for p in engine.sparse_model.parameters()]
    before = engine.generate(PROMPTS, SAMPLING, METHODS["rkv"])
    second.save(tmp_path / "second")
    engine.update_sparse_adapter(tmp_path / "second")
    expected = engine_of(loaded, sparse_adapter=second).generate(PROMPTS, SAMPLING, METHODS["rkv"])
    after = engine.generate(PROMPTS, SAMPLING, METHODS["rkv"])
    assert [r.token_ids for r in after] == [r.token_ids for r in expected] != [r.token_ids for r in before]
    assert [p.data_ptr() for p in engine.sparse_model.parameters()] == addresses
    engine.update_weights([(name, 0.9 * p.detach()) for name, p in loaded.model.named_parameters()])
    fresh_engine = engine_of(loaded, sparse_adapter=second)  # on the same parameters, which were just changed
    for one, other in zip(
        engine.generate(PROMPTS, SAMPLING, METHODS["rkv"]), fresh_engine.generate(PROMPTS, SAMPLING, METHODS["rkv"])
    ):
        assert torch.equal(one.logprobs, other.logprobs)


# --- files ------------------------------------------------------------------------------------------------------


def test_saved_adapter_loads_in_peft(models, tmp_path):
    peft = pytest.importorskip("peft")
    loaded = models[3]
    adapter = random_adapter(loaded.model, targets=("q_proj", "up_proj"))
    adapter.save(tmp_path)
    ids = torch.tensor([PROMPTS[0]])
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(loaded.model), str(tmp_path))
    engine = engine_of(loaded, sparse_adapter=str(tmp_path))
    with torch.no_grad():
        merged = theirs.merge_and_unload()
        expected = merged(ids).logits
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(engine.sparse_model.get_parameter(name), parameter, rtol=1e-6, atol=1e-7)
    assert (expected - loaded.model(ids).logits).abs().max() > 0.01
    theirs.peft_config["default"].save_pretrained(tmp_path)  # as peft itself writes the settings
    again = Adapter.load(tmp_path)
    for name, (a, b) in adapter.weights.items():
        assert torch.equal(a, again.weights[name][0])
        assert torch.equal(b, again.weights[name][1])
    assert (again.rank, again.alpha) == (adapter.rank, adapter.alpha)


@pytest.mark.slow
def test_invalid_input_raises(models, tmp_path):
    loaded = models[3]
    distiller, engine = distiller_of(loaded.model), engine_of(loaded)
    both = Sparsity(Evict("rkv", 24, buffer=5, window=3, sinks=2), Select("block-topk", 12, 4, 1))
    with pytest.raises(SettingError, match="evictor and a selector"):
        distiller.score(engine.generate(PROMPTS, SAMPLING, both, record=True))
    with pytest.raises(SettingError, match="record=True"):
        distiller.score(engine.generate(PROMPTS, SAMPLING, METHODS["rkv"]))
    quest, topk = (engine.generate(PROMPTS, SAMPLING, METHODS[m]) for m in ("quest", "block-topk"))
    one_batch = distiller_of(loaded.model, token_budget=10_000)
    with pytest.raises(SettingError, match="selectors"):
        one_batch.score(quest + topk)
    with pytest.raises(SettingError, match=r"record: 2 .* 4 prompts"):
        engine.generate(PROMPTS, SAMPLING, METHODS["rkv"], record=[True, False])
    with pytest.raises(SettingError, match="sparse_adapter"):
        engine.update_sparse_adapter(random_adapter(loaded.model))
    with pytest.raises(SettingError, match=r"adapter_config\.json"):
        engine_of(loaded, sparse_adapter=tmp_path)
    with pytest.raises(SettingError, match="q_proj"):
        distiller_of(loaded.model, targets=("q_pro",))
    with pytest.raises(SettingError, match=r"\(72, 48\)"):
        engine_of(models[4], sparse_adapter=random_adapter(loaded.model))
    strange = random_adapter(loaded.model)
    strange.save(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"bias"', '"use_dora": true, "bias"'))
    with pytest.raises(SettingError, match="use_dora"):
        Adapter.load(tmp_path)

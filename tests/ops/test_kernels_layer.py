"""The kernels of a fused decoder layer against transformers' modules and their torch twins."""

import pytest
import torch
from torch.nn.functional import linear
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from alula.ops.append import append
from alula.ops.eight_bits import DTYPES as STORED
from alula.ops.eight_bits import dequantise
from alula.ops.few_rows_linear import gated_linear, partial_linear, parts_of
from alula.ops.paged_attention import NewTokens, paged_attention_triton
from alula.ops.rms_norm import add_norm
from alula.ops.rotary import Rotary, rotate
from alula.ops.silu_mul import silu_mul
from alula.sparsity.select import METHODS
from kernel_inputs import DEVICE, ints, noise

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(params=[False, True], ids=["torch", "triton"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("ALULA_TRITON_INTERPRET", str(int(request.param)))


def close(actual, expected, narrow=2**-6):
    """Equal up to the order of a sum. Triton's interpreter rounds to bfloat16 downwards, at each of several steps."""
    tolerance = 1e-5 if expected.dtype == torch.float32 else narrow
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def norm_of(size, seed, dtype):
    norm = Qwen3RMSNorm(size, eps=1e-5).to(DEVICE, dtype)
    norm.weight.data = 1 + 0.3 * noise(size, seed=seed, dtype=dtype)
    return norm


@DTYPES
@pytest.mark.parametrize("stream_dtype", [None, torch.float32], ids=["narrow", "wide"])
@pytest.mark.parametrize("width", [48, 576])
def test_add_norm(width, stream_dtype, dtype, kernels):
    stream, branch = noise(5, width, dtype=stream_dtype or dtype), noise(5, width, seed=1, dtype=dtype) * 3
    norm = norm_of(width, 2, dtype)
    with torch.no_grad():
        total, normed = add_norm(stream, branch, norm.weight, norm.variance_epsilon)
        close(total, stream + branch)
        close(normed, norm(stream + branch).to(dtype))
        total, normed = add_norm(stream, None, norm.weight, norm.variance_epsilon)
        assert torch.equal(total, stream)
        close(normed, norm(stream).to(dtype))


@pytest.mark.parametrize("stream_dtype", [torch.float16, torch.float32], ids=["narrow", "wide"])
def test_add_norm_of_a_branch_in_parts(stream_dtype, kernels):
    """The sum of the parts is rounded before it is added, as a whole product would be."""
    stream, parts = noise(5, 48, dtype=stream_dtype), noise(3, 5, 48, seed=1) * 3
    norm = norm_of(48, 2, torch.float16)
    whole = parts.sum(0).half()
    with torch.no_grad():
        for actual, expected in zip(
            add_norm(stream, parts, norm.weight, norm.variance_epsilon),
            add_norm(stream, whole, norm.weight, norm.variance_epsilon),
            strict=True,
        ):
            torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)
        total = add_norm(torch.zeros_like(stream).float(), parts, norm.weight, norm.variance_epsilon)[0]
    assert torch.equal(total, whole.float())


@pytest.mark.parametrize("rows", [1, 5, 17, 64])
@pytest.mark.parametrize(("width", "columns"), [(64, 64), (192, 576), (2048, 128)])
def test_products_of_few_rows(rows, width, columns, monkeypatch):
    """Against torch's products in float32, rounded as these; as many parts as the shape wants."""
    x, weight = noise(rows, columns, dtype=torch.float16), noise(width, columns, seed=1, dtype=torch.float16)
    wide = linear(x.float(), weight.float())
    monkeypatch.setenv("ALULA_TRITON_INTERPRET", "1")
    parts = partial_linear(x, weight)
    assert parts.shape == (parts_of(rows, width, columns), rows, width)
    torch.testing.assert_close(parts.sum(0), wide, rtol=1e-5, atol=1e-4)
    expected = silu_mul(wide.half()).float()
    torch.testing.assert_close(gated_linear(x, weight).float(), expected, rtol=4e-3, atol=4e-3)


def test_parts_of_a_product():
    assert parts_of(8, 2048, 2048) == 8  # 32 tiles, at most eight parts
    assert parts_of(8, 4096, 2048) == 6  # 64 tiles
    assert parts_of(64, 2048, 6144) == 4
    assert parts_of(8, 576, 256) == 4  # blocks of 64 columns
    assert parts_of(8, 65536, 256) == 1


def test_other_products_are_torchs(monkeypatch):
    """Too many rows, a bias, float32, widths that no tile divides, and views; and everything without Triton."""
    monkeypatch.setenv("ALULA_TRITON_INTERPRET", "1")
    half = {"dtype": torch.float16}
    for x, weight, bias in (
        (noise(65, 64, **half), noise(128, 64, **half), None),
        (noise(4, 64, **half), noise(128, 64, **half), noise(128, **half)),
        (noise(4, 64), noise(128, 64), None),
        (noise(4, 64, **half), noise(96, 64, **half), None),
        (noise(4, 96, **half), noise(128, 96, **half), None),
        (noise(4, 128, **half)[:, ::2], noise(128, 64, **half), None),
        (noise(4, 64, **half), noise(64, 128, **half).T, None),
    ):
        assert torch.equal(partial_linear(x, weight, bias), linear(x, weight, bias))
        assert torch.equal(gated_linear(x, weight, bias), silu_mul(linear(x, weight, bias)))
    x, weight = noise(4, 64, **half), noise(400 * 64, 64, seed=1, **half)
    assert torch.equal(gated_linear(x, weight), silu_mul(linear(x, weight)))  # too wide for one wave
    monkeypatch.setenv("ALULA_TRITON_INTERPRET", "0")
    if DEVICE == "cpu":
        x, weight = noise(4, 64, **half), noise(128, 64, **half)
        assert torch.equal(partial_linear(x, weight), linear(x, weight))


@DTYPES
@pytest.mark.parametrize("width", [40, 1536])
def test_silu_mul(width, dtype, kernels):
    gate_up = noise(3, 2 * width, dtype=dtype) * 4
    close(silu_mul(gate_up), ACT2FN["silu"](gate_up[:, :width]) * gate_up[:, width:])


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norms"])
def test_packed_tokens_are_rotated_as_the_modules_do(normed, dtype, kernels):
    x = noise(21, 5, 24, dtype=dtype)[:, 1:4]
    angle = torch.cat([noise(21, 12, seed=1)] * 2, 1) * 9
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    norm = norm_of(24, 2, dtype)
    with torch.no_grad():
        expected = apply_rotary_pos_emb(*[norm(x) if normed else x] * 2, cos, sin)[0]
    rotary = Rotary(cos, sin, epsilon=1e-5)
    close(rotate(x, norm.weight.detach() if normed else None, rotary), expected, 2**-5)  # after a norm and a rotation


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("stored_as", [None, *STORED.values()], ids=["kv", *STORED])
@pytest.mark.parametrize("group", [1, 3])
def test_appended_tokens_are_rotated_first(group, stored_as, normed, dtype, kernels):
    """What `append` writes of a joint product is what it writes of queries and keys that the modules rotated."""
    rows, dim, page, selector = 4, 24, 4, METHODS["quest"]
    joint = noise(rows, 2 * group + 4, dim, dtype=dtype)
    q, k, v = joint[:, : 2 * group], joint[:, 2 * group : -2], joint[:, -2:]
    angle = torch.cat([noise(8, dim // 2, seed=1)] * 2, 1) * 9
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    kv_len, live, position, ring_size = ints([0, 3, 7, 2]), ints([1, 1, 1, 0]), ints([5, 3, 7, 2]), ints([2, 3, 0, 3])
    norms = [norm_of(dim, seed, dtype) for seed in (2, 3)]
    rotary = Rotary(cos, sin, *(n.weight.detach() if normed else None for n in norms), 1e-5)
    with torch.no_grad():
        turned = [norm(x) if normed else x for norm, x in zip(norms, (q, k))]
        turned = apply_rotary_pos_emb(*turned, cos[position.long()], sin[position.long()])
    table = (1 + torch.randperm(rows * 2, generator=torch.Generator().manual_seed(4))).view(rows, 2).int().to(DEVICE)
    results = []
    for new, rotation in (((q, k, v), rotary), ((*turned, v), None)):
        keys, values = (noise(rows * 2 + 1, 2, page, dim, seed=s, dtype=dtype) for s in (5, 6))
        scales = None
        if stored_as:
            keys, values = keys.to(stored_as), values.to(stored_as)
            scales = torch.full((2, rows * 2 + 1, 2, page), 127, dtype=torch.uint8, device=DEVICE)
        ring = noise(rows, 2 * group, 3, dim, seed=7, dtype=dtype)
        summaries = noise(rows * 2 + 1, 2, 2, dim, seed=8, dtype=dtype)
        at = (table, kv_len, live, position, ring_size)
        query = append(*new, keys, values, *at, ring, summaries, selector, scales, rotation)
        assert query.shape == q.shape
        held = [keys[1:], values[1:]]
        if scales is not None:
            held = [dequantise(x, scale[1:], dtype) for x, scale in zip(held, scales)]
        results.append([query, ring, *held, summaries[1:]])
    for i, (actual, expected) in enumerate(zip(*results)):
        if stored_as and i > 1:  # a last bit may move a key to its other neighbour
            torch.testing.assert_close(actual, expected, rtol=0.13, atol=0.05)
        else:
            close(actual, expected, 2**-5)  # after a norm and a rotation


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("ringed", [False, True], ids=["no ring", "ring"])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_that_appends_is_append_and_attention(group, ringed, normed, dtype, monkeypatch):
    """To the bit without norms, which a GPU may sum in another order. Rows of one and of several pieces, one of them at
    the end of a page, and one that has ended."""
    monkeypatch.setenv("ALULA_TRITON_INTERPRET", "1")
    rows, dim, page, width = 5, 24, 4, 40
    joint = noise(rows, 2 * group + 4, dim, dtype=dtype)
    q, k, v = joint[:, : 2 * group], joint[:, 2 * group : -2], joint[:, -2:]
    angle = torch.cat([noise(200, dim // 2, seed=1)] * 2, 1) * 9
    norms = [norm_of(dim, seed, dtype).weight.detach() if normed else None for seed in (2, 3)]
    rotary = Rotary(angle.cos().to(dtype), angle.sin().to(dtype), *norms, 1e-5)
    table = (1 + torch.randperm(rows * width, generator=torch.Generator().manual_seed(4))).view(rows, width)
    table = table.int().to(DEVICE)
    kv_len, live = ints([0, 3, 131, 159, 60]), ints([1, 1, 1, 1, 0])
    position, ring_size = ints([7, 3, 190, 159, 61]), ints([2, 3, 0, 3, 3])
    context = (kv_len * live + 1)[:, None]
    results = []
    for fused in (False, True):
        keys, values = (noise(rows * width + 1, 2, page, dim, seed=s, dtype=dtype) for s in (5, 6))
        ring = noise(rows, 2 * group, 3, dim, seed=7, dtype=dtype) if ringed else None
        read = (keys, values, table[:, None], context, 0.2, 160)
        if fused:
            new = NewTokens(k, v, live, position, rotary, ring, ring_size)
            out, lse = paged_attention_triton(q, *read, new=new)
        else:
            rest = (ring, None, None, None, rotary)
            query = append(q, k, v, keys, values, table, kv_len, live, position, ring_size, *rest)
            out, lse = paged_attention_triton(query, *read)
        results.append([out[:-1], lse[:-1], keys[1:], values[1:], ring if ringed else out[:-1]])
    for expected, actual in zip(*results, strict=True):
        if normed:
            close(actual, expected)
        else:
            assert torch.equal(actual, expected)

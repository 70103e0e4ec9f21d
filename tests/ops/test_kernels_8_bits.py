"""Kernels on quantised KV: against the format's own table of values, their torch twins, and the same kernels on the
values that the cache stands for."""

import math

import pytest
import torch

import oracle
from alula.ops import paged_attention as attention_module
from alula.ops import pieces as pieces_module
from alula.ops.accumulate_attention import accumulate_attention
from alula.ops.append import append
from alula.ops.compact import PagedKeys, compact, gather_keys
from alula.ops.eight_bits import DTYPES as STORED
from alula.ops.eight_bits import dequantise, quantise
from alula.ops.frequency_score import frequency_score_torch, frequency_score_triton
from alula.ops.importance import mean_attention_torch, mean_attention_triton
from alula.ops.paged_attention import paged_attention, paged_attention_torch
from alula.ops.pieces import Pieces
from alula.ops.projected_norm import projected_norm_torch, projected_norm_triton
from alula.ops.summarise_pages import summarise_pages_torch, summarise_pages_triton
from alula.ops.write_tokens import write_tokens_torch, write_tokens_triton
from alula.sparsity.select import METHODS
from kernel_inputs import DEVICE, ints, noise, shuffled_table

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

HALF = pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.gpu)  # the interpreter cannot multiply it
DTYPES = pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="float32"), HALF])


@pytest.fixture
def kernels(monkeypatch):
    def use(on: bool) -> None:
        monkeypatch.setenv("ALULA_TRITON_INTERPRET", "1" if on else "0")

    return use


@pytest.fixture(params=STORED.values(), ids=STORED)
def stored_as(request):
    return request.param


@pytest.fixture
def quantised(stored_as):
    """A pool of vectors of very different lengths: what is stored, exponents, and the values they stand for."""

    def pool(*shape, seed, spread=3.0):
        lengths = torch.exp(spread * noise(*shape[:-1], 1, seed=seed + 100))
        stored, exponent = quantise(noise(*shape, seed=seed) * lengths, stored_as)
        return stored, exponent, dequantise(stored, exponent, torch.float32)

    return pool


def bits(x):
    return x.view(torch.uint8)


AWKWARD = [
    [0.0] * 4,
    [448.0, -448.0, 1.0, 2**-9],
    [448.00003, 1.0, -0.0, 2.0**-20],
    [449.0, 464.0, -3.0, 0.0625],
    [1e-38, -1e-40, 0.0, 3e-39],
    [3e38, -1.0, 1e30, 1e36],
    [2**-10, 1.5 * 2**-9, 2.5 * 2**-9, 448],
    [17.0, 19.0, 21.0, 256.0],
]


@pytest.mark.parametrize("kv_dtype", STORED)
def test_rounds_to_the_nearest_value_of_the_format(kv_dtype):
    for vectors in (torch.tensor(AWKWARD), noise(300, 24).cpu() * torch.logspace(-6, 6, 300)[:, None]):
        expected = torch.tensor([oracle.rounded(vector, kv_dtype) for vector in vectors.tolist()])
        stored, exponent = quantise(vectors, STORED[kv_dtype])
        assert torch.equal(dequantise(stored, exponent, torch.float32), expected)
        assert exponent.dtype == torch.uint8
        assert (exponent >= 1).all()


def test_the_stored_values_are_exact_in_bfloat16_and_stay_when_stored_again(quantised, stored_as):
    stored, exponent, values = quantised(200, 32, seed=1, spread=5.0)
    assert torch.equal(values, dequantise(stored, exponent, torch.bfloat16).float())
    assert torch.equal(values, dequantise(*quantise(values, stored_as), torch.float32))


def test_the_kernel_rounds_as_torch_does(stored_as):
    """Up to the sign of zero; also views of a joint product, and vectors of any length."""
    joint = noise(40, 6, 24) * torch.logspace(-6, 6, 40)[:, None, None].to(DEVICE)
    for x in (torch.tensor(AWKWARD, device=DEVICE)[:, None], joint[:, 2:5], joint.transpose(0, 1)):
        tokens, heads, dim = x.shape
        pool = torch.zeros(2, tokens, heads, 1, dim, device=DEVICE).to(stored_as)
        scales = torch.zeros(2, tokens, heads, 1, dtype=torch.uint8, device=DEVICE)
        page = torch.arange(tokens, device=DEVICE)
        write_tokens_triton(x, x, page, torch.zeros_like(page), pool[0], pool[1], scales)
        stored, exponent = quantise(x, stored_as)
        for actual in pool:
            assert torch.equal(actual[:, :, 0].float(), stored.float())
        for actual in scales:
            assert torch.equal(actual[:, :, 0], exponent)


def test_not_finite_becomes_nan(stored_as, kernels):
    """Also for a reader: such a key or value makes attention's sum NaN. The interpreter's casts to e4m3 lose it."""
    for bad in (math.inf, -math.inf, math.nan):
        stored, exponent = quantise(torch.tensor([1.0, bad, 2.0]), stored_as)
        assert dequantise(stored, exponent, torch.float32)[1].isnan()
    table, tokens, page = shuffled_table(1, 12)[:, None], ints([[40]]), torch.arange(13, device=DEVICE)
    for which in (0, 1):
        both = noise(2, 13, 2, 24)
        both[which, int(table[0, 0, 1]), :, 5] = math.nan
        for on in (False, True) if stored_as == torch.int8 or DEVICE == "cuda" else (False,):
            kernels(on)
            keys, values = torch.zeros(2, 13, 2, 4, 24, device=DEVICE).to(stored_as)
            scales = torch.ones(2, 13, 2, 4, dtype=torch.uint8, device=DEVICE)
            (write_tokens_triton if on else write_tokens_torch)(*both, page, page * 0, keys, values, scales)
            out, _ = paged_attention(noise(1, 6, 24), keys, values, table, tokens, 0.3, 40, scales)
            assert out[..., 5].isnan().all()


@DTYPES
@pytest.mark.parametrize("selector", [None, *METHODS.values()], ids=["none", *METHODS])
def test_append_quantises(selector, dtype, kernels, quantised, stored_as):
    rows, width, page = 5, 4, 4
    table = shuffled_table(rows, width)
    kv_len, live = ints([0, page - 1, 2 * page - 1, width * page, 3 * page - 1]), ints([1, 1, 1, 0, 1])
    lengths = torch.logspace(-5, 5, rows)[:, None, None].to(DEVICE)
    q, k, v = noise(rows, 6, 24), noise(rows, 2, 24, seed=1) * lengths, noise(rows, 2, 24, seed=2) / lengths
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    results = []
    for on in (False, True):
        kernels(on)
        (keys, key_scales, _), (values, value_scales, _) = (
            quantised(rows * width + 1, 2, page, 24, seed=seed) for seed in (3, 4)
        )
        scales = torch.stack([key_scales, value_scales])
        summaries = noise(rows * width + 1, 2, selector.vectors, 24, seed=5, dtype=dtype) if selector else None
        zeros = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        append(q, k, v, keys, values, table, kv_len, live, zeros, zeros, None, summaries, selector, scales)
        results.append([bits(keys)[1:], bits(values)[1:], scales[:, 1:]])
        for row in (0, 1, 2, 4):
            p, slot = int(table[row, kv_len[row] // page]), int(kv_len[row] % page)
            for part, scale, given in ((keys, scales[0], k), (values, scales[1], v)):
                stored, exponent = quantise(given[row], stored_as)
                assert torch.equal(bits(part[p, :, slot]), bits(stored))
                assert torch.equal(scale[p, :, slot], exponent)
            if selector and slot == page - 1:
                held = dequantise(keys[p], scales[0, p], dtype)
                torch.testing.assert_close(summaries[p], selector.summarise(held).to(dtype), rtol=1e-2, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("selector", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize(("page", "dim"), [(1, 8), (16, 24), (64, 80), (256, 96)])
def test_summaries_of_full_pages(page, dim, selector, dtype, quantised):
    """Quantised and plain keys, in some pages of every layer; the others stay."""
    stored, exponent, values = quantised(2, 7, 3, page, dim, seed=1, spread=1.0)
    pages = torch.tensor([5, 1, 4], device=DEVICE)
    for keys, scales in ((stored, exponent), (values.to(dtype), None)):
        results = [torch.full((2, 7, 3, selector.vectors, dim), 9.0, device=DEVICE, dtype=dtype) for _ in range(3)]
        for summarise, summaries in zip((summarise_pages_torch, summarise_pages_triton), results):
            summarise(keys, pages, summaries, selector, scales)
        results[2][:, pages] = selector.summarise(values[:, pages]).to(dtype)
        if selector.vectors == 2:
            assert torch.equal(results[0], results[1])
            assert torch.equal(results[0], results[2])
        else:
            rounding = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
            torch.testing.assert_close(results[0], results[1], **rounding)
            torch.testing.assert_close(results[0], results[2], **rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lists", [1, 2], ids=["one list", "a list per head"])
def test_attention_is_that_over_the_values_the_pool_stands_for(lists, dtype, kernels, monkeypatch, quantised):
    """In float32 bit for bit: a power of two changes no digit. Bytes that no row holds are NaN."""
    page, width = 4, 20
    table = torch.stack([shuffled_table(3, width, seed=h) for h in range(lists)], 1)
    tokens = ints([[70], [33], [5]]).expand(3, lists).contiguous()
    q = noise(3, 6, 24, dtype=dtype)
    (keys, key_scales, _), (values, value_scales, _) = (
        quantised(3 * width + 1, 2, page, 24, seed=seed, spread=1.0) for seed in (1, 2)
    )
    held = torch.zeros(keys.shape[:3], dtype=torch.bool, device=DEVICE)
    for b in range(3):
        for h in range(2):
            own = table[b, h if lists > 1 else 0]
            for t in range(int(tokens[b, 0])):
                held[int(own[t // page]), h, t % page] = True
    bits(keys)[~held], bits(values)[~held] = 0x7F, 0x7F
    scales = torch.stack([key_scales, value_scales])
    scales[:, ~held] = 255
    plain = [dequantise(x, scale, dtype) for x, scale in zip((keys, values), scales)]
    exact = paged_attention_torch(q.float(), *(x.float() for x in plain), table, tokens, 0.3, 70)
    monkeypatch.setattr(attention_module, "tile", lambda *_: (32, 1, 3))  # as for quantised KV
    monkeypatch.setattr(pieces_module, "SHORTEST", 32)
    monkeypatch.setattr(pieces_module, "LONGEST", 32)
    monkeypatch.setattr(Pieces, "of", lambda row_heads, **_: Pieces(row_heads, 40))
    for on in (False, True):
        kernels(on)
        actual = paged_attention(q, keys, values, table, tokens, 0.3, 70, scales)
        if dtype == torch.float32:
            assert all(map(torch.equal, actual, paged_attention(q, *plain, table, tokens, 0.3, 70)))
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
        torch.testing.assert_close(actual[0].float(), exact[0], **tolerance)
        torch.testing.assert_close(actual[1], exact[1], rtol=1e-5, atol=1e-5)


def test_attention_in_float16_survives_queries_and_values_of_any_size(kernels, quantised):
    """Query heads from 1e-30 to 1e30, and tokens whose keys and values differ by as much: exact up to float16's
    rounding of the weights, relative to the largest value read."""
    kernels(True)
    table, tokens = shuffled_table(2, 20)[:, None], ints([[70], [80]])
    reach = torch.tensor([1e-30, 1e-3, 1.0, 30.0, 1e4, 1e30]).to(DEVICE)
    q = (noise(2, 6, 24) * reach[None, :, None]).bfloat16()
    (keys, key_scales, k), (values, value_scales, v) = (quantised(41, 2, 4, 24, seed=s, spread=s) for s in (1, 6))
    scales = torch.stack([key_scales, value_scales])
    out, lse = paged_attention(q, keys, values, table, tokens, 0.3, 80, scales)
    exact, exact_lse = paged_attention_torch(q.float(), k, v, table, tokens, 0.3, 80)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-4)
    largest = v[table[:, 0].long()].abs().amax((1, 3, 4)).repeat_interleave(3, 1)[..., None]
    assert ((out.float() - exact).abs() <= 2e-3 * largest + 0.01 * exact.abs()).all()


def test_attention_sums_are_those_of_the_values(kernels, quantised):
    table, tokens, wanted = shuffled_table(3, 20)[:, None], ints([[70], [80], [3]]), ints([1, 0, 1])
    q, lse = noise(3, 6, 24), noise(3, 6, seed=3) + 5
    keys, scales, plain = quantised(61, 2, 4, 24, seed=1, spread=1.0)
    for on in (False, True):
        kernels(on)
        sums, expected = torch.zeros(2, 5, 2, 90, device=DEVICE)
        accumulate_attention(q, keys, table, tokens, lse, 0.3, 80, sums, wanted, scales)
        accumulate_attention(q, plain, table, tokens, lse, 0.3, 80, expected, wanted)
        assert sums.any()
        torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)


@DTYPES
def test_evictors_read_the_values(dtype, kernels, quantised):
    keys, scales, _ = quantised(2, 41, 2, 4, 24, seed=1, spread=1.0)
    plain, table = dequantise(keys, scales, dtype), shuffled_table(2, 20) - 1
    for on in (False, True):
        kernels(on)
        assert torch.equal(gather_keys(keys, table, 70, scales, dtype), gather_keys(plain, table, 70))
    kernels(True)
    queries = noise(4, 6, 8, 24, dtype=dtype)
    paged = PagedKeys(keys, table, 70, scales, dtype)
    actual = mean_attention_triton(queries, paged, 0.2, 8)
    assert torch.equal(actual, mean_attention_triton(queries, PagedKeys(plain, table, 70), 0.2, 8))
    torch.testing.assert_close(actual, mean_attention_torch(queries, paged.gathered, 0.2, 8), rtol=1e-4, atol=1e-6)
    directions = noise(4, 24, 5, seed=7)
    expected = projected_norm_torch(paged.gathered, directions)
    torch.testing.assert_close(projected_norm_triton(paged, directions), expected, rtol=1e-4, atol=1e-4)
    query, weights = noise(4, 6, 24, seed=8), noise(4, 6, 12, seed=9)
    expected = frequency_score_torch(paged.gathered, query, weights)
    torch.testing.assert_close(frequency_score_triton(paged, query, weights), expected, rtol=1e-4, atol=1e-4)


def test_scales_move_with_their_tokens(kernels, quantised):
    pages = shuffled_table(1, 40)[0]
    old, new = pages[:24].view(2, 12), pages[24:36].view(2, 6)
    kept = torch.stack([torch.randperm(45)[:21].sort()[0] for _ in range(8)]).view(2, 2, 2, 21).int().to(DEVICE)
    results = []
    for on in (False, True):
        kernels(on)
        (keys, key_scales, k), (values, value_scales, v) = (quantised(2, 41, 2, 4, 24, seed=seed) for seed in (1, 2))
        scales = torch.stack([key_scales, value_scales])
        compact(keys, values, kept, old, new, scales)
        compact(k, v, kept, old, new)
        assert torch.equal(dequantise(keys, scales[0], torch.float32), k)
        assert torch.equal(dequantise(values, scales[1], torch.float32), v)
        results.append([bits(keys), bits(values), scales])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_real_sizes_of_quantised_kv_in_bf16(dim, kernels, quantised):
    page, width = 16, 129
    table, tokens = shuffled_table(4, width)[:, None], ints([[2050], [1024], [513], [1]])
    (keys, key_scales, _), (values, value_scales, _) = (
        quantised(4 * width + 1, 8, page, dim, seed=seed, spread=1.0) for seed in (1, 2)
    )
    scales = torch.stack([key_scales, value_scales])
    plain = [dequantise(x, s, torch.float32) for x, s in ((keys, key_scales), (values, value_scales))]
    for group in (1, 2, 7):
        q = noise(4, 8 * group, dim, dtype=torch.bfloat16)
        out, lse = paged_attention(q, keys, values, table, tokens, dim**-0.5, 2050, scales)
        expected, expected_lse = paged_attention_torch(q.float(), *plain, table, tokens, dim**-0.5, 2050)
        torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=2e-3)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("stored_as", [None, *STORED.values()], ids=["plain", *STORED])
@pytest.mark.parametrize("dim", [16, 24])
def test_packed_tokens_go_to_their_pages(dim, stored_as):
    """Views of a joint product, pages in any order: every slot by hand, and both implementations equal."""
    tokens, heads, page, count = 11, 3, 4, 6
    joint = noise(tokens, 2 * heads, dim, seed=3) * torch.logspace(-3, 3, tokens, device=DEVICE)[:, None, None]
    key, value = joint[:, :heads], joint[:, heads:]
    places = torch.randperm(count * page, generator=torch.Generator().manual_seed(4))[:tokens].to(DEVICE)
    results = []
    for write in (write_tokens_torch, write_tokens_triton):
        keys, values = (torch.zeros(count, heads, page, dim, device=DEVICE) for _ in range(2))
        scales = None
        if stored_as:
            keys, values = keys.to(stored_as), values.to(stored_as)
            scales = torch.zeros(2, count, heads, page, dtype=torch.uint8, device=DEVICE)
        read = write(key, value, places // page, places % page, keys, values, scales)
        held = [keys, values]
        if scales is not None:
            held = [dequantise(pool, exponent, torch.float32) for pool, exponent in zip(held, scales)]
        for given, pool, back in zip((key, value), held, read):
            expected = dequantise(*quantise(given, stored_as), torch.float32) if stored_as else given
            assert torch.equal(back, expected)
            for token, place in enumerate(places.tolist()):
                assert torch.equal(pool[place // page, :, place % page], expected[token])
            assert (pool != 0).any(-1).sum() == tokens * heads
        results.append([*held, *([] if scales is None else [scales])])
    for by_torch, by_kernel in zip(*results):
        assert torch.equal(by_torch, by_kernel)

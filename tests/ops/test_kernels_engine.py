"""The engine's kernels against their torch twins: on CUDA if available, else in Triton's interpreter."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from alula import Engine, Evict, Sampling, Select, Sparsity
from alula.engine.sequence import rollout_key
from alula.ops import paged_attention as attention_module
from alula.ops import pieces as pieces_module
from alula.ops.accumulate_attention import accumulate_attention
from alula.ops.append import append, append_torch
from alula.ops.compact import compact, gather_keys
from alula.ops.paged_attention import paged_attention, paged_attention_torch
from alula.ops.pieces import Pieces
from alula.ops.sample import proposal_logits, sample_torch, sample_triton
from alula.ops.select_pages import score_pages_torch, select_pages_torch, select_pages_triton
from alula.ops.top_indices import top_indices_torch, top_indices_triton
from alula.sparsity.select import METHODS
from alula.sparsity.select.quest import Quest
from kernel_inputs import DEVICE, ints, noise, shuffled_table

# the interpreter is numpy, which warns of the infinities that the kernels mask
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

GROUPS = pytest.mark.parametrize("group", [1, 3, 7])
PAGES = pytest.mark.parametrize("page", [4, 16])


@pytest.fixture
def kernels(monkeypatch):
    """Switches between the kernels and the references behind the public functions."""

    def use(on: bool) -> None:
        monkeypatch.setenv("ALULA_TRITON_INTERPRET", "1" if on else "0")

    return use


def close(actual, expected, **tolerance):
    torch.testing.assert_close(actual, expected, **({"rtol": 1e-5, "atol": 2e-6} | tolerance))


def paged_attention_literal(q, keys, values, table, tokens, scaling):
    """Every row, head and token by itself, in double precision."""
    batch, q_heads, dim = q.shape
    kv_heads, page = keys.shape[1:3]
    group = q_heads // kv_heads
    out, lse = torch.zeros(batch, q_heads, dim, dtype=torch.double), torch.zeros(batch, q_heads, dtype=torch.double)
    for b in range(batch):
        for h in range(q_heads):
            kv = h // group
            own = kv if table.shape[1] > 1 else 0
            count = int(tokens[b, kv if tokens.shape[1] > 1 else 0])
            places = [(int(table[b, own, t // page]), t % page) for t in range(count)]
            key = torch.stack([keys[p, kv, s] for p, s in places]).double().cpu()
            value = torch.stack([values[p, kv, s] for p, s in places]).double().cpu()
            logits = key @ q[b, h].double().cpu() * scaling
            out[b, h] = logits.softmax(0) @ value
            lse[b, h] = logits.logsumexp(0)
    return out.float().to(q.device), lse.float().to(q.device)


def poison_what_is_not_held(keys, values, table, tokens):
    """NaN wherever no row may read: beyond each row's tokens and on every unlisted page."""
    page = keys.shape[2]
    held = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
    for b in range(table.shape[0]):
        for h in range(keys.shape[1]):
            own, count = table[b, h if table.shape[1] > 1 else 0], int(tokens[b, h if tokens.shape[1] > 1 else 0])
            for t in range(count):
                held[int(own[t // page]), h, t % page] = True
    keys[~held], values[~held] = math.nan, math.nan


@pytest.fixture
def cut(monkeypatch):
    """Sets the lengths of pieces: the shortest and longest, the length up to which contexts are whole, and how many
    programs the rows should make."""

    def set_lengths(shortest, whole, longest=None, programs=1 << 20):
        for name, value in {"SHORTEST": shortest, "LONGEST": longest or shortest}.items():
            monkeypatch.setattr(pieces_module, name, value)
        monkeypatch.setattr(Pieces, "of", lambda row_heads, **_: Pieces(row_heads, whole, programs))

    return set_lengths


@GROUPS
@PAGES
@pytest.mark.slow
def test_paged_attention(group, page, kernels, cut):
    """Rows of one token, of several splits, at page and split borders; all others' memory is poison."""
    cut(*((32, 100) if page == 4 else (64, 64)))
    lengths = ints([[1], [64], [65], [150]])
    width = 160 // page
    table = shuffled_table(4, width)[:, None]
    q = noise(4, 2 * group, 24)
    keys, values = noise(4 * width + 1, 2, page, 24, seed=1), noise(4 * width + 1, 2, page, 24, seed=2)
    poison_what_is_not_held(keys, values, table, lengths)
    expected = paged_attention_literal(q, keys, values, table, lengths, 0.3)
    for on in (False, True):
        kernels(on)
        for actual, wanted in zip(paged_attention(q, keys, values, table, lengths, 0.3, 150), expected):
            close(actual, wanted)


@GROUPS
@PAGES
@pytest.mark.slow
def test_paged_attention_with_a_list_per_head(group, page, kernels, cut):
    cut(32, 64)
    width = 96 // page
    table = torch.stack([shuffled_table(3, width, seed=h) for h in range(2)], 1)
    tokens = ints([[5, 70], [33, 1], [96, 64]])
    q = noise(3, 2 * group, 16)
    keys, values = noise(3 * width + 1, 2, page, 16, seed=1), noise(3 * width + 1, 2, page, 16, seed=2)
    poison_what_is_not_held(keys, values, table, tokens)
    expected = paged_attention_literal(q, keys, values, table, tokens, 0.25)
    for on in (False, True):
        kernels(on)
        for actual, wanted in zip(paged_attention(q, keys, values, table, tokens, 0.25, 96), expected):
            close(actual, wanted)


def test_paged_attention_takes_views_and_large_logits(kernels):
    """Queries cut from a joint product, a table cut from a wider one, logits far beyond exp's range."""
    joint = noise(2, 10, 32) * 40
    q = joint[:, 2:6]
    table = shuffled_table(2, 12)[:, None, :8]
    keys, values = noise(25, 2, 4, 32, seed=1) * 10, noise(25, 2, 4, 32, seed=2)
    tokens = ints([[30], [7]])
    expected = paged_attention_literal(q, keys, values, table, tokens, 1.0)
    for on in (False, True):
        kernels(on)
        out, lse = paged_attention(q, keys, values, table, tokens, 1.0, 30)
        close(out, expected[0], rtol=1e-4, atol=1e-4)
        close(lse, expected[1], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("whole", [64, 100])
@pytest.mark.parametrize("on", [False, True])
def test_attention_of_a_row_does_not_depend_on_how_long_its_neighbours_are(on, whole, kernels, cut, monkeypatch):
    cut(32, whole, longest=64, programs=9)  # pieces of 70 tokens are short, those of 256 long
    monkeypatch.setattr(attention_module, "TORCH_CHUNK", 16)
    kernels(on)
    table = shuffled_table(2, 64)[:, None]
    q, keys, values = noise(2, 6, 16), noise(129, 2, 4, 16, seed=1), noise(129, 2, 4, 16, seed=2)
    short = paged_attention(q, keys, values, table, ints([[70], [9]]), 0.25, 70)
    long = paged_attention(q, keys, values, table, ints([[70], [256]]), 0.25, 256)
    assert torch.equal(short[0][0], long[0][0])
    assert torch.equal(short[1][0], long[1][0])


def test_on_a_cpu_rows_read_a_few_at_a_time_say_what_they_say_together(kernels, monkeypatch):
    kernels(False)
    monkeypatch.setattr(attention_module, "TORCH_CHUNK", 16)
    table, lengths = shuffled_table(7, 12)[:, None].expand(7, 2, 12), [[3, 48], [17, 1], [48, 48], [9, 9], [31, 2]]
    tokens = ints([*lengths, [16, 16], [5, 40]])  # of each KV head, as under a selector
    q, keys, values = noise(7, 6, 16), noise(85, 2, 4, 16, seed=1), noise(85, 2, 4, 16, seed=2)
    together = paged_attention(q, keys, values, table, tokens, 0.25, 48)
    monkeypatch.setattr(attention_module, "TORCH_VALUES", 3 * 16 * 2 * 16)
    for parted, whole in zip(paged_attention(q, keys, values, table, tokens, 0.25, 48), together):
        assert torch.equal(parted, whole)


def test_pieces_grow_with_rows_and_with_a_rows_own_length():
    def lengths(row_heads, counts):
        return [Pieces.of(row_heads).length(count) for count in counts]

    assert lengths(8, (128, 129, 8192, 32768, 131072)) == [128, 128, 128, 512, 1024]
    assert lengths(280, (1024, 1025, 2048, 4096, 32768)) == [1024, 512, 1024, 1024, 1024]
    assert Pieces.of(127).whole == 128
    assert Pieces.of(128).whole == 1024
    assert Pieces.of(9999, selected=True).whole == 128
    assert Pieces.of(1023, quantised=True).whole == 128
    assert Pieces.of(1024, quantised=True).whole == 1024
    assert Pieces.of(280, quantised=True).length(4096) == 1024
    assert Pieces.of(280, quantised=True).length(2048) == 512


@given(
    row_heads=st.integers(1, 5000),
    most=st.integers(1, 300_000),
    selected=st.booleans(),
    quantised=st.booleans(),
    data=st.data(),
)
def test_no_context_has_more_pieces_than_the_launch(row_heads, most, selected, quantised, data):
    pieces = Pieces.of(row_heads, selected, quantised)
    count = data.draw(st.integers(1, most) | st.sampled_from([most, min(most, pieces.whole + 1)]))
    assert -(-count // pieces.length(count)) <= pieces.most(most)
    borders = range(128, min(most, 300_000) + 1, 128)  # pieces change their length at multiples of the shortest
    ends = {most, *(border - 1 for border in borders)}
    assert pieces.most(most) == max(-(-end // pieces.length(end)) for end in ends)


@pytest.mark.parametrize(("piece", "whole"), [(128, 128), (128, 200), (256, 1024), (1024, 1024)])
def test_attention_over_pieces_of_each_length(piece, whole, kernels, cut):
    """A row of 300 tokens takes several pieces or one; the bound of 2,000 tokens makes merging necessary or not."""
    cut(piece, whole)
    table = shuffled_table(3, 20)[:, None]
    tokens = ints([[300], [129], [1]])
    q, keys, values = noise(3, 4, 16), noise(61, 2, 16, 16, seed=1), noise(61, 2, 16, 16, seed=2)
    expected = paged_attention_torch(q, keys, values, table, tokens, 0.25, 300)
    kernels(True)
    bounded = paged_attention(q, keys, values, table, tokens, 0.25, 300)
    for actual, wanted in zip(bounded, expected):
        close(actual, wanted)
    assert all(map(torch.equal, bounded, paged_attention(q, keys, values, table, tokens, 0.25, 2000)))
    half = [x.half() for x in (q, keys, values)]
    one, many = (paged_attention(*half, table, tokens, 0.25, most) for most in (300, 2000))
    assert all(map(torch.equal, one, many))


@GROUPS
def test_accumulate_attention(group, kernels):
    table = shuffled_table(3, 20)[:, None]
    tokens, wanted = ints([[70], [80], [3]]), ints([1, 0, 1])
    q, keys = noise(3, 2 * group, 24), noise(61, 2, 4, 24, seed=1)
    values = noise(61, 2, 4, 24, seed=2)
    poison_what_is_not_held(keys, values, table, tokens)
    _, lse = paged_attention_torch(q, keys, values, table, tokens, 0.3, 80)
    before = noise(5, 2, 90, seed=3).abs()
    results = []
    for on in (False, True):
        kernels(on)
        sums = before.clone()
        accumulate_attention(q, keys, table, tokens, lse, 0.3, 80, sums, wanted)
        results.append(sums)
    for sums in results:
        added = sums - before
        close(added[0].sum(-1), torch.full((2,), float(group), device=DEVICE), rtol=1e-4)  # one softmax per head
        assert not added[1].any(), "a row that did not ask"
        assert not added[2, :, 3:].any(), "beyond its tokens"
        assert not added[3:].any(), "rows that did not run"
        for h in range(2):
            for t in (0, 33, 69):
                logits = [
                    [float(q[0, h * group + g] @ keys[table[0, 0, i // 4], h, i % 4]) * 0.3 for i in range(70)]
                    for g in range(group)
                ]
                total = sum(torch.tensor(row).softmax(0)[t].item() for row in logits)
                assert added[0, h, t].item() == pytest.approx(total, abs=1e-5)
    close(*results)


class Unfused(Quest):
    """A selector that the kernels do not know."""

    fused = False


SELECTORS = METHODS | {"unfused": Unfused()}


# --- pages to read -----------------------------------------------------------------------------------------------


@GROUPS
@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_select_pages(group, selector, kernels):
    """Budgets below, at and above what a row holds; rows of one page; a dense row."""
    page, width = 4, 20
    table = shuffled_table(6, width)
    tokens = ints([77, 80, 12, 1, 40, 73])
    budget = ints([5, 19, 3, 3, 1 << 30, 3])
    q, keys = noise(6, 2 * group, 24), noise(6 * width + 1, 2, page, 24, seed=1)
    summaries = selector.summarise(keys).contiguous()
    expected, read = select_pages_torch(q, summaries, table, tokens, budget, page, 80, selector)
    actual, actual_read = select_pages_triton(q, summaries, table, tokens, budget, page, 80, selector)
    assert torch.equal(actual_read, read)
    scores = score_pages_torch(q, summaries, table, selector)
    for b in range(6):
        held = -(-int(tokens[b]) // page)
        count = min(int(budget[b]), held)
        assert read[b].tolist() == [(count - 1) * page + int(tokens[b]) - (held - 1) * page] * 2
        for h in range(2):
            chosen = actual[b, h, :count].tolist()
            assert chosen == expected[b, h, :count].tolist()
            own = table[b, :held].tolist()
            places = [own.index(p) for p in chosen]
            assert places == sorted(set(places))
            assert {0, held - 1, max(0, held - 2)} <= set(places)
            free = range(1, held - 2)
            best = sorted(free, key=lambda i: -float(scores[b, h, i]))[: count - 3] if count < held else free
            assert set(best) <= set(places)


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_select_pages_breaks_ties_by_index(selector, kernels):
    """All summaries alike, zeros of both signs: the first pages win, in both."""
    table = shuffled_table(2, 30)
    summaries = torch.zeros(61, 1, selector.vectors, 8, device=DEVICE)
    summaries[::2] = -0.0
    q = noise(2, 3, 8)
    tokens, budget = ints([120, 118]), ints([7, 12])
    for choose in (select_pages_torch, select_pages_triton):
        pages, _ = choose(q, summaries, table, tokens, budget, 4, 120, selector)
        assert pages[0, 0, :7].tolist() == [*table[0, :5].tolist(), *table[0, 28:30].tolist()]
        assert pages[1, 0, :12].tolist() == [*table[1, :10].tolist(), *table[1, 28:30].tolist()]


def test_selected_pages_are_what_attention_reads(kernels):
    """The two kernels hand over to each other as the two references do."""
    table, tokens, budget = shuffled_table(3, 16), ints([61, 64, 9]), ints([4, 6, 1 << 30])
    q, summaries = noise(3, 6, 16), noise(49, 2, 1, 16, seed=1)
    keys, values = noise(49, 2, 4, 16, seed=2), noise(49, 2, 4, 16, seed=3)
    results = []
    for on, choose in ((False, select_pages_torch), (True, select_pages_triton)):
        kernels(on)
        pages, read = choose(q, summaries, table, tokens, budget, 4, 64, SELECTORS["block-topk"])
        results.append(paged_attention(q, keys, values, pages, read, 0.25, 64))
    close(results[1][0], results[0][0])
    dense = paged_attention_literal(q, keys, values, table[:, None], tokens[:, None], 0.25)
    close(results[1][0][2], dense[0][2])
    assert not torch.allclose(results[1][0][0], dense[0][0], atol=1e-3)


# --- the largest entries -----------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3e38, -3e38, 1.0000001]


@pytest.mark.parametrize("n", [1, 7, 100])
def test_top_indices(n):
    drawn = torch.randint(len(SPECIAL), (4, n), generator=torch.Generator().manual_seed(n))
    ties = torch.tensor(SPECIAL)[drawn]
    ties[3] = math.nan
    for scores in (ties.to(DEVICE), noise(2, n + 5, seed=n)[:, :n]):
        for count in {1, (n + 1) // 2, n}:
            expected = []
            for row in scores.tolist():
                value = [-math.inf if math.isnan(x) else x for x in row]
                expected.append(sorted(sorted(range(n), key=lambda i: (-value[i], i))[:count]))
            assert top_indices_torch(scores, count).tolist() == expected
            assert top_indices_triton(scores, count).tolist() == expected


# --- writing -----------------------------------------------------------------------------------------------------


@GROUPS
@PAGES
@pytest.mark.parametrize("selector", [None, *SELECTORS.values()], ids=["none", *SELECTORS])
def test_append(group, page, selector, kernels):
    """Live rows inside and at the end of a page, a row that is not live, rings of different sizes."""
    rows, width = 5, 4
    table = shuffled_table(rows, width)
    kv_len = ints([0, page - 1, 2 * page - 1, width * page, 3 * page - 1])  # the fourth ended with its table full
    live, position = ints([1, 1, 1, 0, 1]), ints([0, 29, 18, 4, 7])
    ring_size = ints([3, 8, 0, 8, 1])
    joint = noise(rows, 2 * group + 4, 24)
    q, k, v = joint[:, : 2 * group], joint[:, 2 * group : -2], joint[:, -2:]
    state = lambda: (  # noqa: E731
        noise(rows * width + 1, 2, page, 24, seed=1),
        noise(rows * width + 1, 2, page, 24, seed=2),
        noise(rows + 2, 2 * group, 8, 24, seed=3),
        noise(rows * width + 1, 2, selector.vectors, 24, seed=4) if selector else None,
    )
    results = []
    kernels(True)
    for write in (append_torch, append):
        keys, values, ring, summaries = state()
        write(q, k, v, keys, values, table, kv_len, live, position, ring_size, ring, summaries, selector)
        results.append((keys, values, ring, summaries))
    before = state()
    for keys, values, ring, summaries in results:
        for r in range(rows):
            if not live[r]:
                own = table[r].long()
                assert torch.equal(keys[own], before[0][own]), "a row that is not live touches only page 0"
                continue
            place, slot = int(table[r, kv_len[r] // page]), int(kv_len[r] % page)
            assert torch.equal(keys[place, :, slot], k[r])
            assert torch.equal(values[place, :, slot], v[r])
            for w in range(8):
                wanted = int(ring_size[r]) > 0 and w == int(position[r]) % max(int(ring_size[r]), 1)
                assert torch.equal(ring[r, :, w], q[r] if wanted else before[2][r, :, w])
            if summaries is not None:
                if slot == page - 1:
                    block = keys[place]
                    literal = [block.mean(1)] if selector.vectors == 1 else [block.amin(1), block.amax(1)]
                    close(summaries[place], torch.stack(literal, 1))
                else:
                    assert torch.equal(summaries[place], before[3][place])
        assert torch.equal(ring[3], before[2][3])
    for name, (a, b) in enumerate(zip(*results)):
        if a is not None:
            close(a[1 if name != 2 else 0 :], b[1 if name != 2 else 0 :])


@pytest.mark.parametrize(("page", "dim"), [(4, 24), (16, 16), (1, 8)])
def test_gather_and_compact(page, dim, kernels):
    layers, heads, rows, n, count = 3, 2, 2, 70, 37
    old_width, new_width = -(-n // page), -(-count // page) + 1
    table = shuffled_table(rows, old_width + new_width)
    old, new = table[:, :old_width], table[:, old_width:]
    kept = (
        torch.stack(
            [
                torch.stack(
                    [
                        torch.randperm(n, generator=torch.Generator().manual_seed(i))[:count].sort().values
                        for i in range(j, j + layers * heads)
                    ]
                )
                for j in range(rows)
            ]
        )
        .view(rows, layers, heads, count)
        .int()
        .to(DEVICE)
    )
    results = []
    for on in (False, True):
        kernels(on)
        shape = (layers, rows * (old_width + new_width) + 1, heads, page, dim)
        keys, values = noise(*shape, seed=1), noise(*shape, seed=2)
        before = keys.clone(), values.clone()
        gathered = gather_keys(keys, old, n)
        compact(keys, values, kept, old, new)
        for r in range(rows):
            for layer in range(layers):
                for h in range(heads):
                    for i in (0, 1, count // 2, count - 1):
                        source = int(kept[r, layer, h, i])
                        src, dst = int(old[r, source // page]), int(new[r, i // page])
                        for cache, was in zip((keys, values), before):
                            moved = was[layer, src, h, source % page]
                            assert torch.equal(cache[layer, dst, h, i % page], moved)
                        assert torch.equal(gathered[r, layer, h, source], before[0][layer, src, h, source % page])
        for cache, was in zip((keys, values), before):
            untouched = torch.ones(shape[1], dtype=torch.bool, device=DEVICE)
            untouched[new.flatten().long()] = False
            assert torch.equal(cache[:, untouched], was[:, untouched])
        results.append((gathered, keys, values))
    assert all(torch.equal(a, b) for a, b in zip(*results))


# --- drawing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [96, 5000, 12288])
@pytest.mark.slow
def test_sample(vocabulary):
    """One piece of the vocabulary and several, ragged; warm, greedy, forced and cut rows together."""
    rows = 6
    logits = noise(rows, vocabulary + 3)[:, :vocabulary] * 3
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 1.0], device=DEVICE)
    forced = ints([-1, -1, -1, vocabulary - 1, 5, -1], torch.int64)
    banned = ints([[-1], [int(logits[1].argmax())], [-1], [-1], [-1], [-1]], torch.int64)
    cut = proposal_logits(
        logits,
        temperature,
        torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0, 0.9], device=DEVICE),
        ints([0, 0, 0, 0, 0, 40], torch.int64),
        banned,
    )
    for proposal in (None, cut):
        for turn in range(5):
            keys = ints([rollout_key(turn, 0, r) for r in range(rows)], torch.int64)
            counter = torch.arange(rows, device=DEVICE) + 1000 * turn
            token, logprob = sample_torch(logits, temperature, keys, counter, forced, proposal)
            actual, actual_logprob = sample_triton(logits, temperature, keys, counter, forced, proposal)
            assert actual.tolist() == token.tolist()
            close(actual_logprob, logprob)
            assert actual.tolist()[3:5] == [vocabulary - 1, 5]
            if proposal is not None:
                assert cut.gather(1, actual[:, None])[[0, 1, 2, 5]].isfinite().all()
                assert actual[1] != logits[1].argmax()


def test_random_numbers_of_the_kernel_are_those_of_the_reference():
    """Flat logits, so that the noise alone decides; keys and positions at their ends, three blocks of token ids."""
    vocabulary = 9000
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF, -987654321987654321]
    positions = [0, 1, 2**31 - 1, 40000]
    pairs = [(k, c) for k in keys for c in positions]
    key, position = (torch.tensor(x, device=DEVICE) for x in zip(*pairs))
    rows = len(pairs)
    arguments = (
        torch.zeros(rows, vocabulary, device=DEVICE),
        torch.ones(rows, device=DEVICE),
        key,
        position,
        torch.full((rows,), -1, device=DEVICE),
    )
    token, logprob = sample_triton(*arguments)
    assert token.tolist() == sample_torch(*arguments)[0].tolist()
    assert len(set(token.tolist())) > rows // 2
    close(logprob, torch.full((rows,), -math.log(vocabulary), device=DEVICE))


def test_sample_reports_non_finite_logits():
    """NaN and +inf give a log-prob that is not finite and a token inside the vocabulary; neighbours are exact."""
    logits = noise(4, 5000)
    logits[1, 4500], logits[2, 17] = math.nan, math.inf
    arguments = (
        torch.ones(4, device=DEVICE),
        torch.arange(4, device=DEVICE),
        torch.arange(4, device=DEVICE),
        torch.full((4,), -1, device=DEVICE),
    )
    expected = sample_torch(logits, *arguments)
    actual = sample_triton(logits, *arguments)
    for token, logprob in (expected, actual):
        assert ((token >= 0) & (token < 5000)).all()
        assert logprob.isfinite().tolist() == [True, False, False, True]
    assert actual[0][[0, 3]].tolist() == expected[0][[0, 3]].tolist()


def test_ties_are_drawn_alike_at_temperature_0():
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [4000, 8500]] = 1.0
    logits[1, [70, 71]] = 1.0
    arguments = (
        torch.zeros(2, device=DEVICE),
        torch.arange(2, device=DEVICE),
        torch.arange(2, device=DEVICE),
        torch.full((2,), -1, device=DEVICE),
    )
    assert sample_triton(logits, *arguments)[0].tolist() == sample_torch(logits, *arguments)[0].tolist() == [4000, 70]


@pytest.mark.slow
def test_the_whole_engine_on_kernels(kernels):
    """Prompt, decoding, eviction, compaction and selection together: the same rollouts as with the references."""
    loaded = oracle.custom_model(3, layers=1)
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    policies = [
        Sparsity(Evict("rkv", 18, buffer=2, window=3, sinks=1), Select("quest", 16, 4, 0)),
        Sparsity(Evict("h2o", 8, buffer=2, window=3, sinks=1)),
        Sparsity(),
    ]
    results = []
    for on in (False, True):
        kernels(on)
        engine = Engine(loaded, page=4, kv_memory="1MiB", max_rows=3, lookahead=3)
        results.append(engine.generate([list(range(5, 24)), [7, 8] * 4, [9]], Sampling(max_new_tokens=7), policies))
    for reference, kernel in zip(*results):
        assert kernel.token_ids == reference.token_ids
        close(kernel.logprobs, reference.logprobs, rtol=0, atol=1e-5)
        assert (kernel.kv.evictions > 0) == (reference.sparsity.evict is not None)

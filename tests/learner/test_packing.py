import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alula.errors import SettingError
from alula.learner.packing import collate, pack
from alula.ops.packed_attention import packed_attention


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(1, 100))
def test_every_sequence_once_within_budget_or_alone(lengths, budget):
    batches = pack(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        assert sum(lengths[i] for i in batch) <= budget or len(batch) == 1
    # first-fit leaves no two batches that would fit together: on average they are more than half full
    assert sum(lengths) * 2 > budget * (len(batches) - 1) or len(batches) == 0


def test_pack_is_deterministic_and_balanced():
    rng = random.Random(0)
    lengths = [rng.randint(100, 4000) for _ in range(200)]
    first, again = pack(lengths, 16384), pack(list(lengths), 16384)
    assert first == again
    totals = [sum(lengths[i] for i in batch) for batch in first]
    assert max(totals) - min(totals) < 0.05 * max(totals)


def sequences(seed=0, count=6):
    rng = random.Random(seed)
    return [
        SimpleNamespace(
            prompt_ids=[rng.randrange(100) for _ in range(rng.randint(1, 7))],
            token_ids=[rng.randrange(100) for _ in range(rng.randint(0, 9))],
        )
        for _ in range(count)
    ]


def test_targets_are_exactly_the_response_tokens():
    rollouts = sequences()
    index = [4, 0, 3]
    packed = collate(rollouts, index)
    flat = [token for i in index for token in rollouts[i].prompt_ids + rollouts[i].token_ids]
    assert packed.input_ids[0].tolist() == flat
    assert packed.target_ids.tolist() == [token for i in index for token in rollouts[i].token_ids]
    # walked by hand: the position before every response token, the sequence it lies in, its own position
    expected, rows, positions, start = [], [], [], 0
    for row, i in enumerate(index):
        prompt, response = rollouts[i].prompt_ids, rollouts[i].token_ids
        for k in range(len(prompt) + len(response)):
            positions.append(k)
            if len(prompt) <= k + 1 < len(prompt) + len(response):
                expected.append(start + k)
                rows.append(row)
        start += len(prompt) + len(response)
        assert packed.cu_seqlens[row + 1] == start
    assert packed.targets.tolist() == expected
    assert packed.sequence.tolist() == rows
    assert packed.position_ids[0].tolist() == positions
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == packed.cu_seqlens.diff().max()


def test_flat_rows_and_split_are_inverse_views_of_the_callers_list():
    rollouts = sequences(seed=3)
    values = [torch.randn(len(r.token_ids)) for r in rollouts]
    packed = collate(rollouts, [5, 1, 2])
    for part, i in zip(packed.split(packed.flat(values)), [5, 1, 2]):
        assert torch.equal(part, values[i])
    assert packed.rows(torch.arange(6.0)).tolist() == [5.0, 1.0, 2.0]


def test_an_empty_prompt_raises():
    with pytest.raises(SettingError, match="empty prompt"):
        collate([SimpleNamespace(prompt_ids=[], token_ids=[1])], [0])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_packed_attention_equals_a_masked_softmax(heads, window):
    """Oracle: one big softmax over the whole pack with the block-diagonal causal mask written out."""
    torch.manual_seed(0)
    lengths = [1, 7, 4]
    total, dim, (hq, hkv) = sum(lengths), 8, heads
    q, k, v = (torch.randn(total, h, dim, dtype=torch.float64, requires_grad=True) for h in (hq, hkv, hkv))
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    t = torch.arange(total)
    visible = (owner[:, None] == owner[None]) & (t[:, None] >= t[None])
    if window:
        visible &= t[:, None] - t[None] < window
    kk, vv = (x.repeat_interleave(hq // hkv, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, kk) * 0.3
    expected = torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), vv)

    boundaries = torch.tensor([0, 1, 8, 12], dtype=torch.int32)
    actual = packed_attention(q, k, v, boundaries, 7, 0.3, window)
    torch.testing.assert_close(actual, expected)
    seed = torch.randn_like(actual)
    for a, b in zip(torch.autograd.grad(actual, (q, k, v), seed), torch.autograd.grad(expected, (q, k, v), seed)):
        torch.testing.assert_close(a, b)

"""Begin and end of a decode step: kernels against their torch twins."""

import pytest
import torch

from alula.ops.advance_rows import (
    Budgets,
    RowState,
    begin_step_torch,
    begin_step_triton,
    end_step_torch,
    end_step_triton,
)
from kernel_inputs import DEVICE

pytestmark = pytest.mark.kernels


def rows_of(batch, stops, seed=0):
    """Random rows; some have ended, some have nothing left to decode."""
    random = torch.Generator().manual_seed(seed)

    def ints(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=random).to(DEVICE, dtype)

    forced = ints(-3, 6, batch, 4, dtype=torch.int64).clamp(min=-1)
    own = (ints(0, 6, batch, stops, dtype=torch.int64), ints(0, 2, batch)) if stops else (None, None)
    return RowState(
        ints(0, 90, batch),
        ints(0, 40, batch),
        ints(0, 3, batch),
        ints(0, 2, batch),
        ints(0, 9, batch),
        ints(0, 6, batch, dtype=torch.int64),
        forced,
        torch.tensor([2], device=DEVICE),
        *own,
    )


@pytest.mark.parametrize("bins", [0, 1, 3])
@pytest.mark.parametrize("stops", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 37, 1500])
def test_kernels_equal_their_twins(batch, stops, bins, monkeypatch):
    monkeypatch.setenv("ALULA_TRITON_INTERPRET", "1")
    expected, actual = rows_of(batch, stops), rows_of(batch, stops)
    budgets = None
    if bins:
        pages = torch.arange(batch * bins, dtype=torch.int32, device=DEVICE).view(batch, bins)
        budgets = Budgets(pages, torch.arange(batch, dtype=torch.int32, device=DEVICE) % 40)
    for left, right in zip(begin_step_torch(expected, budgets), begin_step_triton(actual, budgets), strict=True):
        torch.testing.assert_close(right, left, rtol=0, atol=0)
    token = torch.arange(batch, device=DEVICE) % 6
    logprob = -torch.rand(batch, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    outs = []
    for rows, end in ((expected, end_step_torch), (actual, end_step_triton)):
        outs.append((torch.zeros_like(rows.forced), torch.zeros(batch, 4, device=DEVICE)))
        end(rows, token, logprob, *outs[-1])
    for left, right in zip((*expected, *outs[0]), (*actual, *outs[1]), strict=True):
        assert left is right is None or torch.equal(left, right)
    assert int(actual.column) == 3

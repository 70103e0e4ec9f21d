"""Inputs of kernels, on the GPU where there is one."""

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def shuffled_table(rows: int, width: int, seed: int = 0) -> Tensor:
    """Distinct pages in no order; page 0 is the scratch page."""
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(seed)) + 1
    return order.view(rows, width).int().to(DEVICE)

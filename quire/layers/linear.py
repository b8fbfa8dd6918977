"""Weights of matrix products and tables of rows. The products themselves are the kernels'."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.kernels.contract import Kernels


class Linear(nn.Module):
    """A weight (out, in) and perhaps a bias (out,), not initialised."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def __call__(self, x: Tensor, kernels: Kernels) -> Tensor:
        """x (num_rows, in) -> (num_rows, out)."""
        return kernels.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A weight (rows, size), not initialised, of which rows are looked up."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype))

    def __call__(self, ids: Tensor) -> Tensor:
        """ids int64 (num_tokens,) -> (num_tokens, size)."""
        return F.embedding(ids, self.weight)

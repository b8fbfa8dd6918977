"""Muon, an optimizer for matrices (Jordan et al., 2024): orthogonalized momentum."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, by the authors of Muon
NUM_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Updates each matrix by its orthogonalized momentum, so that all directions learn at the same rate."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all matrices, those of equal shape in one batch."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Parameter]] = {}
            for matrix in group["params"]:
                by_shape.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in by_shape.items():
                directions = orthogonal(torch.stack([self._nesterov(matrix, group["momentum"]) for matrix in matrices]))
                length = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, direction in zip(matrices, directions, strict=True):
                    matrix.mul_(1 - group["lr"] * group["decay"]).add_(direction, alpha=-length)

    def _nesterov(self, matrix: Parameter, momentum: float) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["velocity"] = torch.zeros_like(matrix)
        assert matrix.grad is not None
        velocity = state["velocity"].mul_(momentum).add_(matrix.grad)
        return matrix.grad.add(velocity, alpha=momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """(n, rows, columns) -> the same with singular values all near 1, by a Newton-Schulz iteration in bfloat16."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)

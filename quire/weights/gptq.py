"""GPTQ (Frantar et al., 2023): weights rounded column by column, each error corrected in the columns after it.

The error that counts is that of the products with inputs x: e H eᵀ for a row of errors e and the Hessian H = sum xᵀ x.
"""

import torch
from torch import Tensor

from quire.kernels.contract import QuantizedRows, Scheme
from quire.kernels.reference.codes import codes_of, nearest_numbers, quantize_rows

_DAMPING = 0.1  # of the mean of the Hessian's diagonal, added to the diagonal


def error_factors(hessian: Tensor) -> Tensor:
    """The upper triangular U with Uᵀ U = H⁻¹, float32 (columns, columns). hessian: H, which is damped first.

    Raises ValueError for numbers that are not finite.
    """
    if not hessian.isfinite().all():
        raise ValueError("inputs of the layer are not finite")
    eye = torch.eye(len(hessian), device=hessian.device)
    damping = _DAMPING * hessian.diagonal().mean()
    damped = hessian.float() + torch.where(damping > 0, damping, 1) * eye
    root = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)  # upper triangular, H = root rootᵀ
    factors: Tensor = torch.linalg.solve_triangular(root, eye, upper=True)
    return factors


def quantize_with_feedback(
    weight: Tensor, factors: Tensor, scheme: Scheme, *, largest: Tensor | None = None
) -> QuantizedRows:
    """A weight (rows, columns) of any float type, rounded to a scheme of 4 bits with groups and without offsets.

    factors: from `error_factors`. largest: see `quantize_rows`, which chooses the scales of a group after the
    corrections of the groups before it. Scales of integers are positive.
    """
    rest, size = weight.float().clone(), scheme.group_size
    codes, scales = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device), []
    for start in range(0, weight.shape[1], size):
        end = start + size
        group = quantize_rows(rest[:, start:end], scheme, positive=True, largest=largest).scales
        scales.append(group)
        scale, errors = group.float(), torch.empty_like(rest[:, start:end])
        for column in range(start, end):
            values = rest[:, column : column + 1]
            numbers = nearest_numbers(values, scale, scheme)
            codes[:, column] = codes_of(numbers, scheme)[:, 0]
            error = (values - numbers * scale) / factors[column, column]
            rest[:, column:end] -= error * factors[column, column:end]
            errors[:, column - start] = error[:, 0]
        rest[:, end:] -= errors @ factors[start:end, end:]
    return QuantizedRows(codes, torch.cat(scales, 1))

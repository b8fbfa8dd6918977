"""Linear layers and embeddings: their weights. Kernels compute the products."""

import torch
from torch import Tensor, nn

from quire.kernels.contract import AdapterTable, Addend, Kernels, Scheme, Weight
from quire.layers.context import ForwardContext


class Linear(nn.Module):
    """A weight (out, in) and an optional bias (out,), not initialised."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: Weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.adapter_table: AdapterTable | None = None  # see `quire.lora.tables`

    def use_kernel_layout(self, kernels: Kernels, parts: int = 1, scheme: Scheme | None = None) -> None:
        """Replace the weight, before it is loaded, by one in the layout of `kernels`.

        parts, scheme: see Kernels.allocate_weight.
        """
        self.weight = allocate_weight(self, "weight", kernels, parts, scheme)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x (num_rows, in) -> (num_rows, out)."""
        return context.kernels.linear(x, self.weight, self.bias, self.addend(x, context))

    def addend(self, x: Tensor, context: ForwardContext) -> Addend | None:
        """What the adapters of the pass add to the product with x (num_rows, in), before bias and activation."""
        rows = context.adapters
        if rows is None or self.adapter_table is None:
            return None
        return context.kernels.low_rank(x, self.adapter_table, rows.slots, rows.width)


class Embedding(nn.Module):
    """An embedding table (rows, size), not initialised."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: Weight = nn.Parameter(torch.empty(rows, size, dtype=dtype))
        self.dtype = dtype

    def use_kernel_layout(self, kernels: Kernels, scheme: Scheme | None = None) -> None:
        """Replace the weight, before it is loaded, by one in the layout of products, because it is also the head."""
        self.weight = allocate_weight(self, "weight", kernels, scheme=scheme)

    def __call__(self, ids: Tensor, context: ForwardContext, scale: float = 1.0) -> Tensor:
        """ids int64 (num_tokens,) -> (num_tokens, size), times `scale`."""
        return context.kernels.embed(ids, self.weight, scale)


def allocate_weight(
    module: nn.Module, name: str, kernels: Kernels, parts: int = 1, scheme: Scheme | None = None
) -> Weight:
    """The weight `name` in the layout of `kernels`, not filled. It is no longer a parameter if the layout differs."""
    parameter = module.get_parameter(name)
    room = kernels.allocate_weight(parameter.shape, parameter.dtype, parts, scheme)
    if room is None:
        return parameter
    delattr(module, name)
    return room

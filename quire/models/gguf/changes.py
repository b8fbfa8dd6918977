"""What llama.cpp's converter does to numbers, backwards. Each function makes what a Hugging Face checkpoint holds."""

from collections.abc import Callable

import torch
from torch import Tensor

Change = Callable[[Tensor], Tensor]


def halves_of_heads(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbours, transformers the halves of a head: rows 0 1 2 3 4 5 become 0 2 4 1 3 5."""
    rest = tensor.shape[1:]
    return tensor.reshape(heads, -1, 2, *rest).transpose(1, 2).reshape(tensor.shape)


def key_groups(tensor: Tensor, heads: int, groups: int) -> Tensor:
    """All queries, keys, values to groups of some queries, a key and a value."""
    rest = tensor.shape[1:]
    each = tensor.reshape(heads + 2 * groups, -1, *rest)
    queries = each[:heads].reshape(groups, heads // groups, -1, *rest)
    keys, values = (each[heads + i * groups :][:groups, None] for i in (0, 1))
    return torch.cat([queries, keys, values], dim=1).reshape(tensor.shape)


def minus_one(tensor: Tensor) -> Tensor:
    """Gemma's norms multiply by 1 + weight; the converter added the 1."""
    return tensor.float() - 1


def transposed(tensor: Tensor) -> Tensor:
    """GPT-2's linear layers are stored input first."""
    return tensor.t().contiguous()

"""Logprobs by the C++ kernels, without a copy of the logits. `quire.kernels.reference.likelihood` specifies them."""

import torch
from torch import Tensor

from quire.kernels.cpu import _C
from quire.kernels.cpu.sampling import kernel_logits


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values of `tokens`, ranks of their first column, ids and values of the k most likely: see Kernels.logprobs.

    Raises ValueError for shapes that do not fit the logits, IndexError for tokens outside of the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    num_tokens = tokens.shape[1]
    if tokens.shape[0] != num_rows or not num_tokens or not 0 <= k <= vocab_size:
        raise ValueError(f"{tuple(tokens.shape)} tokens and {k} likely ones do not fit logits {tuple(logits.shape)}")
    if num_rows and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        raise IndexError(f"tokens must be in [0, {vocab_size}), not {int(tokens.min())} to {int(tokens.max())}")
    logits = kernel_logits(logits)
    values = torch.empty(num_rows, num_tokens)
    ranks = torch.empty(num_rows, dtype=torch.int32)
    top_ids = torch.empty(num_rows, k, dtype=torch.int32)
    top_values = torch.empty(num_rows, k)
    _C.logprobs(
        logits,
        tokens.to(torch.int64).contiguous(),
        values,
        ranks,
        top_ids,
        top_values,
        int(logits.dtype == torch.bfloat16),
        num_rows,
        vocab_size,
        logits.stride(0),
        num_tokens,
        k,
    )
    return values, ranks, top_ids, top_values

"""Logprobs: log probabilities of given tokens with their ranks, and the most likely tokens."""

import torch
from torch import Tensor


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values of `tokens`, ranks of their first column, ids and values of the k most likely: see Kernels.logprobs."""
    values = logits.float().log_softmax(-1)
    own = values.gather(1, tokens.to(values.device))
    ranks = (values > own[:, :1]).sum(-1) + 1
    ids = _most_likely(values, k)
    return own, ranks.int(), ids.int(), values.gather(1, ids)


def _most_likely(values: Tensor, k: int) -> Tensor:
    """Ids (num_rows, k) of the largest float32 values in descending order, ties by id.

    torch.topk does not define the order of ties, so it gets distinct integers that are made of the value and the id.
    The bits of a float, inverted below its sign bit if it is negative, are in the order of the floats.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0, which it is equal to
    ranks = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(values.shape[1], device=values.device)
    keys = (ranks << 32) + (2**32 - 1 - ids)
    return keys.topk(k).indices

"""Log probabilities of tokens, of their most likely alternatives, and of tokens that a request lists."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Logprobs

LOGITS_AT_ONCE = 2**22  # that are reported on together: each takes some 30 bytes meanwhile
_NO_LISTS: Mapping[int, np.ndarray] = MappingProxyType({})


def report(
    logits_of: Callable[[np.ndarray], Tensor],
    vocab_size: int,
    tokens: np.ndarray,
    num_logprobs: np.ndarray,
    listed: Mapping[int, np.ndarray] = _NO_LISTS,
) -> Logprobs | None:
    """For each of `tokens` (num_tokens,): itself, then the most likely ones, then what is listed for it.

    Natural logarithms of the softmax of the raw logits, in float32. logits_of(indices) gives those
    (len(indices), vocab_size) that some of the tokens are judged by; it is asked for few at a time, and each
    once at most. num_logprobs (num_tokens,) is how many likely ones are wanted, -1 for no report, and no more
    are given than the vocabulary has. Of equals the lower id is the more likely. listed: index -> token ids.
    Ends of rows that ask for less, and all of those of tokens of -1, have ids -1, values -inf and ranks 0.
    None when nothing is wanted.
    """
    if not (num_logprobs >= 0).any():
        return None
    wanted = np.minimum(num_logprobs, vocab_size)
    ends = [int(wanted[index]) + len(ids) for index, ids in listed.items() if wanted[index] >= 0]
    width = 1 + max(int(wanted.max()), *ends, 0)
    size = len(tokens)
    logprobs = Logprobs(
        np.full((size, width), -1, np.int32), np.full((size, width), -np.inf, np.float32), np.zeros(size, np.int32)
    )
    asking = np.flatnonzero((wanted >= 0) & (tokens >= 0))
    at_once = max(1, LOGITS_AT_ONCE // vocab_size)
    for first in range(0, len(asking), at_once):
        some = asking[first : first + at_once]
        _fill(logprobs, some, logits_of(some).float().log_softmax(-1), tokens[some], wanted[some], listed)
    return logprobs


def _fill(
    logprobs: Logprobs,
    indices: np.ndarray,
    values: Tensor,
    tokens: np.ndarray,
    wanted: np.ndarray,
    listed: Mapping[int, np.ndarray],
) -> None:
    """Write the entries `indices`, whose log probabilities are `values` (len(indices), vocab_size)."""
    chosen = torch.from_numpy(tokens).to(values.device, torch.int64).unsqueeze(1)
    own = values.gather(1, chosen)
    best = _most_likely(values, int(wanted.max()))
    logprobs.ranks[indices] = ((values > own).sum(-1) + 1).cpu().numpy()
    ids = torch.cat((chosen, best), 1)
    unwanted = np.arange(ids.shape[1]) > wanted[:, None]
    logprobs.ids[indices, : ids.shape[1]] = np.where(unwanted, -1, ids.cpu().numpy())
    logprobs.values[indices, : ids.shape[1]] = np.where(unwanted, -np.inf, values.gather(1, ids).cpu().numpy())
    for place, index in enumerate(indices.tolist() if listed else ()):
        if index in listed:
            start, stop = 1 + wanted[place], 1 + wanted[place] + len(listed[index])
            logprobs.ids[index, start:stop] = listed[index]
            found = values[place, torch.from_numpy(listed[index]).to(values.device)]
            logprobs.values[index, start:stop] = found.cpu().numpy()


def _most_likely(values: Tensor, k: int) -> Tensor:
    """Ids (num_rows, k) of the largest float32 values, falling; equals in the order of their ids.

    topk says nothing about the order of equals, so it is given integers of which no two are equal: the bits of
    a float, those below 0 turned over, rank as the float does.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 the 0.0 that it is equal to
    ranks = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(values.shape[1], device=values.device)
    keys = (ranks << 32) + (2**32 - 1 - ids)
    return keys.topk(k).indices

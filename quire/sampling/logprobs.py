"""Log probabilities of tokens, of the most likely tokens, and of tokens that a request lists."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Logprobs
from quire.kernels.contract import Kernels

MAX_LOGITS_PER_CALL = 2**22  # logits per call of `Kernels.logprobs`, which needs about 30 bytes each
_NO_LISTS: Mapping[int, np.ndarray] = MappingProxyType({})


def compute_logprobs(
    kernels: Kernels,
    logits_of: Callable[[np.ndarray], Tensor],
    vocab_size: int,
    tokens: np.ndarray,
    num_logprobs: np.ndarray,
    listed_tokens: Mapping[int, np.ndarray] = _NO_LISTS,
) -> Logprobs | None:
    """Logprobs of each of `tokens` (num_tokens,), then of the most likely tokens, then of the listed tokens.

    Natural logarithms of the softmax of the raw logits, in float32. logits_of(indices) returns the logits
    (len(indices), vocab_size) of some of the tokens; it is called for few at a time, and at most once for each.
    num_logprobs (num_tokens,): number of most likely tokens, at most vocab_size; -1 for no report. Of equal logprobs
    the lower id counts as more likely. listed_tokens: index -> token ids. Unused entries, and whole rows without a
    report or with token -1, have ids -1, values -inf and ranks 0. Returns None if no token needs a report.
    """
    if not (num_logprobs >= 0).any():
        return None
    wanted = np.minimum(num_logprobs, vocab_size)
    ends = [int(wanted[index]) + len(ids) for index, ids in listed_tokens.items() if wanted[index] >= 0]
    width = 1 + max(int(wanted.max()), *ends, 0)
    size = len(tokens)
    logprobs = Logprobs(
        np.full((size, width), -1, np.int32), np.full((size, width), -np.inf, np.float32), np.zeros(size, np.int32)
    )
    asking = np.flatnonzero((wanted >= 0) & (tokens >= 0))
    at_once = max(1, MAX_LOGITS_PER_CALL // vocab_size)
    for first in range(0, len(asking), at_once):
        some = asking[first : first + at_once]
        asked, k = _requested_tokens(tokens, some, listed_tokens), int(wanted[some].max())
        likelihoods = kernels.logprobs(logits_of(some), torch.from_numpy(asked), k)
        _fill(logprobs, some, likelihoods, asked, wanted[some], listed_tokens)
    return logprobs


def _fill(
    logprobs: Logprobs,
    indices: np.ndarray,
    likelihoods: tuple[Tensor, ...],
    asked: np.ndarray,
    wanted: np.ndarray,
    listed: Mapping[int, np.ndarray],
) -> None:
    """Write the rows `indices`. asked (len(indices), n): tokens of the values in `likelihoods[0]`."""
    values, ranks, best_ids, best_values = (tensor.cpu().numpy() for tensor in likelihoods)
    k = best_ids.shape[1]
    unwanted = np.arange(k) >= wanted[:, None]
    logprobs.ranks[indices] = ranks
    logprobs.ids[indices, 0] = asked[:, 0]
    logprobs.values[indices, 0] = values[:, 0]
    logprobs.ids[indices, 1 : 1 + k] = np.where(unwanted, -1, best_ids)
    logprobs.values[indices, 1 : 1 + k] = np.where(unwanted, -np.inf, best_values)
    for place, index in enumerate(indices.tolist() if listed else ()):
        if index in listed:
            count = len(listed[index])
            start, stop = 1 + wanted[place], 1 + wanted[place] + count
            logprobs.ids[index, start:stop] = asked[place, 1 : 1 + count]
            logprobs.values[index, start:stop] = values[place, 1 : 1 + count]


def _requested_tokens(tokens: np.ndarray, indices: np.ndarray, listed: Mapping[int, np.ndarray]) -> np.ndarray:
    """The token of each of `indices` and the tokens listed for it, padded with 0: int64 (len(indices), n)."""
    lists = [listed.get(index, ()) for index in indices.tolist()]
    asked = np.zeros((len(indices), 1 + max(map(len, lists), default=0)), np.int64)
    asked[:, 0] = tokens[indices]
    for row, ids in zip(asked, lists, strict=True):
        row[1 : 1 + len(ids)] = ids
    return asked

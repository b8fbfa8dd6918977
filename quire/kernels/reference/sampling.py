"""Sampling: logit edits, filters, then the arg max of logits plus counter-based Gumbel noise.

Operations per row, in vLLM's order: masks and bans, bias, repetition, frequency and presence penalty (see `edits`),
then temperature, min_p, top_k, top_p. Each filter applies to the renormalised distribution that the previous one left:

- min_p keeps tokens with p >= min_p * (largest p);
- top_k keeps tokens whose logit is at least the k-th largest, ties included;
- top_p keeps a token if the sum over all more likely tokens is less than top_p: the smallest set that reaches top_p,
  ties included. The most likely token is always kept.

The sampled token is the arg max of logit / temperature - log(e) over the kept tokens, e exponential (Gumbel-max,
Maddison et al., A* sampling, 2014). The noise of token t comes from word t % 4 of Philox with the row's seed as key and
the counter (position, sample index, purpose, t // 4), so the token depends neither on the rest of the batch nor on the
order or the sharding of the vocabulary. Temperature 0 selects the arg max of the edited logits, without filters. The
lowest id wins ties.
"""

import numpy as np
import torch
from torch import Tensor

from quire.kernels.contract import Purpose
from quire.kernels.exact import apply_to_whole_vectors
from quire.kernels.reference.edits import apply_edits, has_edits
from quire.kernels.reference.philox import exponential, philox
from quire.kernels.sampling_contract import SamplingMetadata

LOGITS_AT_ONCE = 2**22  # logits that are sampled from at once: filters and noise need about 50 bytes for each


def sample(logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
    """One token per row of logits (num_rows, vocab_size) -> int64 (num_rows,); -1 if nothing can be sampled."""
    logits = logits.float()
    usable = logits.amax(-1).isfinite()  # the maximum is NaN or +inf if any logit is, -inf if all are
    if has_edits(sampling_metadata):
        logits = apply_edits(logits, sampling_metadata)
        usable &= logits.amax(-1).isfinite()
    tokens = logits.argmax(-1)
    random = np.flatnonzero(sampling_metadata.temperatures > 0)
    at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    for first in range(0, len(random), at_once):
        some = random[first : first + at_once]
        rows = torch.from_numpy(some).to(logits.device)
        tokens[rows] = _sample_random(logits[rows], sampling_metadata, some)
    return torch.where(usable, tokens, -1)


def _sample_random(logits: Tensor, sampling_metadata: SamplingMetadata, rows: np.ndarray) -> Tensor:
    """Tokens of `rows`, which have a temperature above 0. logits: of these rows only."""

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[rows]).to(logits.device)

    # with a largest logit of 0, no temperature overflows
    scores = (logits - logits.amax(-1, keepdim=True)) / column(sampling_metadata.temperatures).unsqueeze(1)
    if sampling_metadata.min_ps[rows].any():
        scores = scores.masked_fill(scores < column(sampling_metadata.min_ps).log().unsqueeze(1), -torch.inf)
    top_ks = np.minimum(sampling_metadata.top_ks[rows], scores.shape[-1])
    if (top_ks > 0).any():
        scores = _apply_top_k(scores, top_ks)
    if (sampling_metadata.top_ps[rows] < 1).any():
        scores = _apply_top_p(scores, column(sampling_metadata.top_ps))
    return (scores + gumbel(sampling_metadata, rows, scores)).argmax(-1)


def _apply_top_k(scores: Tensor, top_ks: np.ndarray) -> Tensor:
    largest = scores.topk(int(top_ks.max())).values
    border = torch.from_numpy(np.maximum(top_ks, 1) - 1).to(scores.device, torch.int64).unsqueeze(1)
    every = torch.from_numpy(top_ks <= 0).to(scores.device).unsqueeze(1)
    return scores.masked_fill((scores < largest.gather(1, border)) & ~every, -torch.inf)


def _apply_top_p(scores: Tensor, top_ps: Tensor) -> Tensor:
    ordered = scores.sort(-1, descending=True).values
    shares = ordered.double().softmax(-1)  # sums over a large vocabulary need float64
    before = shares.cumsum(-1) - shares
    limits = top_ps.double().where(top_ps < 1, torch.inf).unsqueeze(1)
    num_kept = (before < limits).sum(-1, keepdim=True).clamp_(min=1)  # 0 in rows of NaN
    return scores.masked_fill(scores < ordered.gather(1, num_kept - 1), -torch.inf)


def gumbel(sampling_metadata: SamplingMetadata, rows: np.ndarray, like: Tensor) -> Tensor:
    """Standard Gumbel noise of some rows, float32, with the shape (len(rows), vocab_size) and device of `like`."""
    vocab_size = like.shape[-1]

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[rows].astype(np.int64)).to(like.device).unsqueeze(1)

    quads = torch.arange(-(-vocab_size // 4), device=like.device).unsqueeze(0)
    purpose = torch.full((1, 1), int(Purpose.SAMPLE), device=like.device)
    counter = (column(sampling_metadata.positions), column(sampling_metadata.sample_indices), purpose, quads)
    key = (column(sampling_metadata.seeds & np.uint64(0xFFFFFFFF)), column(sampling_metadata.seeds >> np.uint64(32)))
    words = torch.stack(philox(counter, key), -1).flatten(1)[:, :vocab_size]
    return -apply_to_whole_vectors(torch.log, exponential(words))

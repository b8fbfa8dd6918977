"""Changes of logits before sampling: masks, logit edits, penalties.

They are applied in vLLM's order:

1. masks and edits: tokens that are not allowed get -inf, biases are added to the others;
2. repetition penalty r, for tokens of prompt and output (Keskar et al., CTRL, 2019, section 4.1):
   a logit above 0 is divided by r, any other multiplied;
3. frequency penalty f: f times the number of occurrences in the output is subtracted;
4. presence penalty p: p is subtracted if the token is in the output.
"""

import numpy as np
import torch
from torch import Tensor

from quire.kernels.sampling_contract import LogitEdits, Masks, SamplingMetadata

_LARGEST = torch.finfo(torch.float32).max


def has_edits(sampling_metadata: SamplingMetadata) -> bool:
    """Whether any row has a mask, a logit edit or a history for `apply_edits` to apply."""
    return (
        len(sampling_metadata.masks.rows) + len(sampling_metadata.edits.rows) + len(sampling_metadata.history.rows) > 0
    )


def apply_edits(logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
    """A copy of float32 logits (num_rows, vocab_size) with masks, edits and penalties applied."""
    logits = logits.clone(memory_format=torch.contiguous_format)
    if len(sampling_metadata.masks.rows):
        _apply_masks(logits, sampling_metadata.masks)
    if len(sampling_metadata.edits.rows):
        _add_logit_edits(logits, sampling_metadata.edits)
    if len(sampling_metadata.history.rows):
        _apply_penalties(logits, sampling_metadata)
    return logits


def _apply_masks(logits: Tensor, masks: Masks) -> None:
    vocab_size = logits.shape[-1]
    shape = (len(masks.rows), -(-vocab_size // 32))
    if masks.words.shape != shape:
        raise ValueError(f"masks must have shape {shape}, not {masks.words.shape}")
    octets = np.ascontiguousarray(masks.words, "<u4").view(np.uint8)
    allowed = np.unpackbits(octets, axis=-1, count=vocab_size, bitorder="little").astype(bool)
    rows = _tensor(masks.rows, logits)
    logits[rows] = logits[rows].where(_tensor(allowed, logits), -torch.inf)


def _add_logit_edits(logits: Tensor, edits: LogitEdits) -> None:
    where = (_tensor(edits.rows, logits), _tensor(edits.tokens, logits))
    logits.index_put_(where, _tensor(edits.values, logits), accumulate=True)


def _apply_penalties(logits: Tensor, sampling_metadata: SamplingMetadata) -> None:
    """Apply the penalties in place. The work grows with the histories, not with the vocabulary."""
    history = sampling_metadata.history
    places = _tensor(history.rows * logits.shape[-1] + history.tokens, logits)
    places, entries = torch.unique(places, return_inverse=True)
    counts = torch.zeros(len(places), device=logits.device)  # in the output
    counts.index_add_(0, entries, _tensor(history.are_output, logits).float())
    rows = (places // logits.shape[-1]).cpu().numpy()
    repetition, frequency, presence = (
        _tensor(column[rows], logits)
        for column in (
            sampling_metadata.repetition_penalties,
            sampling_metadata.frequency_penalties,
            sampling_metadata.presence_penalties,
        )
    )
    flat = logits.view(-1)
    values = flat[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * counts - presence * (counts > 0)
    flat[places] = values.clamp(max=_LARGEST)  # a tiny repetition penalty must not give inf, which makes a row invalid


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)

"""What a request changes about logits before its token is chosen: masks, bans, biases and penalties.

In this order (vLLM's):

1. masks and edits: -inf for what may not be sampled, biases added to the rest;
2. repetition penalty r, for tokens of the prompt and of the output (Keskar et al., CTRL, 2019, section 4.1):
   a logit above 0 is divided by r, any other multiplied;
3. frequency penalty f: f times how often the token is in the output is subtracted;
4. presence penalty p: p is subtracted if the token is in the output at all.
"""

import numpy as np
import torch
from torch import Tensor

from quire.kernels.contract import Draws, Edits, Masks

_LARGEST = torch.finfo(torch.float32).max


def changes(draws: Draws) -> bool:
    """Whether any row asks for something that `edited` does."""
    return len(draws.masks.rows) + len(draws.edits.rows) + len(draws.history.rows) > 0


def edited(logits: Tensor, draws: Draws) -> Tensor:
    """A copy of float32 logits (num_rows, vocab_size) as the rows' wishes leave them."""
    logits = logits.clone(memory_format=torch.contiguous_format)
    if len(draws.masks.rows):
        _mask(logits, draws.masks)
    if len(draws.edits.rows):
        _edit(logits, draws.edits)
    if len(draws.history.rows):
        _penalise(logits, draws)
    return logits


def _mask(logits: Tensor, masks: Masks) -> None:
    vocab_size = logits.shape[-1]
    shape = (len(masks.rows), -(-vocab_size // 32))
    if masks.words.shape != shape:
        raise ValueError(f"masks must have shape {shape}, not {masks.words.shape}")
    octets = np.ascontiguousarray(masks.words, "<u4").view(np.uint8)
    allowed = np.unpackbits(octets, axis=-1, count=vocab_size, bitorder="little").astype(bool)
    rows = _tensor(masks.rows, logits)
    logits[rows] = logits[rows].where(_tensor(allowed, logits), -torch.inf)


def _edit(logits: Tensor, edits: Edits) -> None:
    where = (_tensor(edits.rows, logits), _tensor(edits.tokens, logits))
    logits.index_put_(where, _tensor(edits.values, logits), accumulate=True)


def _penalise(logits: Tensor, draws: Draws) -> None:
    """Each token of a history once, whatever the size of the vocabulary."""
    history = draws.history
    places = _tensor(history.rows * logits.shape[-1] + history.tokens, logits)
    places, entries = torch.unique(places, return_inverse=True)
    counts = torch.zeros(len(places), device=logits.device)  # in the output
    counts.index_add_(0, entries, _tensor(history.are_output, logits).float())
    rows = (places // logits.shape[-1]).cpu().numpy()
    repetition, frequency, presence = (
        _tensor(column[rows], logits)
        for column in (draws.repetition_penalties, draws.frequency_penalties, draws.presence_penalties)
    )
    flat = logits.view(-1)
    values = flat[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * counts - presence * (counts > 0)
    flat[places] = values.clamp(max=_LARGEST)  # a tiny repetition penalty makes a token likely, not a row useless


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)

"""Masks, logit edits and penalties, fused into the first pass over the logits. `reference.edits` specifies them."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sampling_contract import SamplingMetadata
from quire.kernels.triton.rows import (
    COUNTED,
    FREQUENCY,
    MASK,
    PRESENCE,
    REPETITION,
    TILE,
    load_field,
    load_float_field,
    num_tiles,
)

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_HISTORY_BLOCK = 1024  # history entries that one program counts


def pack_edits(sampling_metadata: SamplingMetadata, row_metadata: np.ndarray, vocab_size: int) -> list[np.ndarray]:
    """Kernel inputs for the edits of all rows. Sets the fields `mask`, `counted` and `edited` of `row_metadata`.

    Returns masks; tokens and values of logit edits, sorted by tile of an edited row; the index at which each tile's
    edits begin; and the history: rows of the counts, and token * 2 + 1 for output, token * 2 for prompt tokens.
    Raises ValueError for masks whose width does not match the vocabulary, IndexError for tokens outside of it.
    """
    masks, edits, history = sampling_metadata.masks, sampling_metadata.edits, sampling_metadata.history
    shape = (len(masks.rows), -(-vocab_size // 32))
    if len(masks.rows) and masks.words.shape != shape:
        raise ValueError(f"masks must have shape {shape}, not {masks.words.shape}")
    for tokens in (edits.tokens, history.tokens):
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
            raise IndexError(f"tokens must be in [0, {vocab_size}), not {tokens.min()} to {tokens.max()}")
    row_metadata["mask"][masks.rows] = np.arange(len(masks.rows))
    row_metadata["counted"] = number_rows(len(row_metadata), history.rows)
    row_metadata["edited"] = number_rows(len(row_metadata), masks.rows, edits.rows, history.rows)
    tiles = row_metadata["edited"][edits.rows] * num_tiles(vocab_size) + edits.tokens // TILE
    order = np.argsort(tiles, kind="stable")  # several edits of one logit are added in their order
    begins = np.searchsorted(tiles[order], np.arange((row_metadata["edited"].max() + 1) * num_tiles(vocab_size) + 1))
    return [
        masks.words.astype(np.uint32, copy=False),
        edits.tokens[order].astype(np.int32),
        edits.values[order].astype(np.float32, copy=False),
        begins.astype(np.int32),
        row_metadata["counted"][history.rows],
        (history.tokens * 2 + history.are_output).astype(np.int32),
    ]


def number_rows(num_rows: int, *chosen: np.ndarray) -> np.ndarray:
    """int32 (num_rows,): consecutive numbers from 0 for the rows in any of `chosen`, -1 for the others."""
    numbers = np.full(num_rows, -1, np.int32)
    for rows in chosen:
        numbers[rows] = 0
    numbers[numbers == 0] = np.arange(np.count_nonzero(numbers == 0))
    return numbers


def count_history(rows: Tensor, entries: Tensor, num_counted: int, vocab_size: int) -> Tensor:
    """int32 (num_counted, vocab_size): 2 per occurrence of a token in the output, plus 1 if it is in the prompt.

    rows and entries: from `pack_edits`. The atomic additions are of integers, so their order does not matter.
    """
    counts = torch.zeros(num_counted, vocab_size, dtype=torch.int32, device=rows.device)
    grid = (-(-len(rows) // _HISTORY_BLOCK),)
    _count[grid](rows, entries, counts, len(rows), vocab_size, BLOCK=_HISTORY_BLOCK)
    return counts


@triton.jit(do_not_specialize=["number"])
def _count(rows_ptr, entries_ptr, counts_ptr, number, vocab_size, BLOCK: tl.constexpr):
    which = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = which < number
    rows = tl.load(rows_ptr + which, mask=inside, other=0).to(tl.int64)
    entries = tl.load(entries_ptr + which, mask=inside, other=0)
    places = counts_ptr + rows * vocab_size + (entries >> 1)
    are_output = (entries & 1) != 0
    tl.atomic_add(places, tl.full([BLOCK], 2, tl.int32), mask=inside & are_output, sem="relaxed")
    tl.atomic_or(places, tl.full([BLOCK], 1, tl.int32), mask=inside & (are_output == 0), sem="relaxed")


@triton.jit
def apply_edits(
    x, tokens, row, slot, metadata_ptr, masks_ptr, tokens_ptr, values_ptr, begins_ptr, counts_ptr, vocab_size
) -> tl.tensor:
    """The logits x of one tile of an edited row, with masks, edits and penalties applied. Grid (., tiles)."""
    mask = load_field(metadata_ptr, row, MASK)
    if mask >= 0:
        places = masks_ptr + mask.to(tl.int64) * tl.cdiv(vocab_size, 32) + tokens // 32
        words = tl.load(places, mask=tokens < vocab_size, other=0)
        x = tl.where(((words >> (tokens % 32)) & 1) != 0, x, float("-inf"))
    tile = slot * tl.num_programs(1) + tl.program_id(1)
    for i in range(tl.load(begins_ptr + tile), tl.load(begins_ptr + tile + 1)):
        x = tl.where(tokens == tl.load(tokens_ptr + i), x + tl.load(values_ptr + i), x)
    counted = load_field(metadata_ptr, row, COUNTED)
    if counted >= 0:
        places = counts_ptr + counted.to(tl.int64) * vocab_size + tokens
        x = _apply_penalties(x, tl.load(places, mask=tokens < vocab_size, other=0), row, metadata_ptr)
    return x


@triton.jit
def _apply_penalties(x, counts, row, metadata_ptr):
    repetition = load_float_field(metadata_ptr, row, REPETITION)
    times = (counts >> 1).to(tl.float32)
    y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    y = y - load_float_field(metadata_ptr, row, FREQUENCY) * times
    y = y - load_float_field(metadata_ptr, row, PRESENCE) * tl.where(times > 0, 1.0, 0.0)
    y = tl.minimum(y, _LARGEST)  # a tiny repetition penalty must not give inf, which makes a row invalid
    return tl.where(counts != 0, y, x)

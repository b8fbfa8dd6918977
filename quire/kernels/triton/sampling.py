"""Sampling without sorting the vocabulary or waiting for the device. `reference.sampling` specifies it.

Every row is cut into tiles. The first kernel applies edits, stores the edited logits, and finds the largest logit of
each tile. The second finds the threshold of a row's filters (see `thresholds`), the third the best score with noise of
each tile, the last the best of each row. A row's token depends on that row alone.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.contract import Purpose
from quire.kernels.sampling_contract import SamplingMetadata
from quire.kernels.triton.edits import apply_edits, count_history, number_rows, pack_edits
from quire.kernels.triton.launch import pow2
from quire.kernels.triton.noise import gumbel
from quire.kernels.triton.rows import (
    EDITED,
    MIN_SCORE,
    POSITION,
    RANDOM_ROW,
    ROW_METADATA,
    SAMPLE_INDEX,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TILE,
    final_logits,
    largest_of_row,
    load_field,
    load_float_field,
    num_tiles,
    raw_logits,
    tile_tensor,
    with_contiguous_rows,
)
from quire.kernels.triton.thresholds import apply_top_k_top_p
from quire.kernels.triton.upload import upload

_SAMPLE = tl.constexpr(int(Purpose.SAMPLE))


def sample(logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
    """One token per row of logits (num_rows, vocab_size) -> int64 (num_rows,); -1 if nothing can be sampled."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    logits = with_contiguous_rows(logits)
    table = pack_metadata(sampling_metadata, vocab_size)
    edits = pack_edits(sampling_metadata, table, vocab_size)
    random = np.flatnonzero(sampling_metadata.temperatures > 0).astype(np.int32)
    filtered = random[(table["top_k"][random] > 0) | (table["top_p"][random] < 1)]
    row_metadata, random_rows, filtered_rows, *edit_arrays = upload([table, random, filtered, *edits], logits.device)
    changed, peaks, ids = edit_and_find_peaks(logits, row_metadata, edit_arrays, table)
    best, best_ids = peaks, ids
    if len(random):
        if len(filtered):
            apply_top_k_top_p(logits, changed, row_metadata, peaks, filtered_rows)
        best, best_ids = _sample_tiles(logits, changed, row_metadata, peaks, random_rows)
    tiles = num_tiles(vocab_size)
    _choose[(num_rows,)](peaks, ids, best, best_ids, row_metadata, out, tiles, TILES=pow2(tiles), num_warps=1)
    return out


def pack_metadata(sampling_metadata: SamplingMetadata, vocab_size: int) -> np.ndarray:
    """The sampling metadata as an array of ROW_METADATA, one entry per row, without the fields of edits."""
    row_metadata = np.zeros(len(sampling_metadata.seeds), ROW_METADATA)
    for name, column in (
        ("temperature", sampling_metadata.temperatures),
        ("top_p", sampling_metadata.top_ps),
        ("repetition", sampling_metadata.repetition_penalties),
        ("frequency", sampling_metadata.frequency_penalties),
        ("presence", sampling_metadata.presence_penalties),
        ("seed_low", sampling_metadata.seeds & np.uint64(0xFFFFFFFF)),
        ("seed_high", sampling_metadata.seeds >> np.uint64(32)),
        ("position", sampling_metadata.positions),
        ("sample_index", sampling_metadata.sample_indices),
    ):
        row_metadata[name] = column
    row_metadata["top_k"] = np.where(sampling_metadata.top_ks < vocab_size, np.maximum(sampling_metadata.top_ks, 0), 0)
    min_scores = torch.from_numpy(sampling_metadata.min_ps.copy()).log()  # rounded as the reference's
    row_metadata["min_score"] = min_scores.numpy()
    row_metadata["mask"] = -1
    row_metadata["random_row"] = number_rows(len(row_metadata), np.flatnonzero(sampling_metadata.temperatures > 0))
    return row_metadata


def edit_and_find_peaks(
    logits: Tensor, row_metadata: Tensor, edit_arrays: list[Tensor], host_metadata: np.ndarray
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The edited logits or None, and per tile the largest logit after edits and the first token that has it.

    edit_arrays: the arrays of `pack_edits`, on the device. The largest logit is NaN if the input tile has NaN or +inf.
    """
    num_rows, vocab_size = logits.shape
    num_edited, num_counted = (int(host_metadata[name].max()) + 1 for name in ("edited", "counted"))
    masks, tokens, values, begins, rows, entries = edit_arrays
    counts = count_history(rows, entries, num_counted, vocab_size) if num_counted else row_metadata
    changed = torch.empty(num_edited, vocab_size, device=logits.device) if num_edited else None
    peaks = tile_tensor(num_rows, vocab_size, logits, torch.float32)
    ids = tile_tensor(num_rows, vocab_size, logits, torch.int32)
    _peaks[peaks.shape](
        logits,
        row_metadata if changed is None else changed,
        row_metadata,
        masks,
        tokens,
        values.view(torch.float32),
        begins,
        counts,
        peaks,
        ids,
        logits.stride(0),
        vocab_size,
        ANY_EDITED=changed is not None,
        TILE=TILE,
        enable_fp_fusion=False,
    )
    return changed, peaks, ids


@triton.jit
def _peaks(
    logits_ptr,
    edited_ptr,
    metadata_ptr,
    masks_ptr,
    tokens_ptr,
    values_ptr,
    begins_ptr,
    counts_ptr,
    peaks_ptr,
    ids_ptr,
    stride,
    vocab_size,
    ANY_EDITED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program for each tile of each row."""
    row = tl.program_id(0)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tokens < vocab_size
    x = raw_logits(logits_ptr, row, stride, tokens, inside)
    is_useless = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) > 0
    if ANY_EDITED:
        slot = load_field(metadata_ptr, row, EDITED)
        if slot >= 0:
            x = apply_edits(
                x,
                tokens,
                row,
                slot,
                metadata_ptr,
                masks_ptr,
                tokens_ptr,
                values_ptr,
                begins_ptr,
                counts_ptr,
                vocab_size,
            )
            tl.store(edited_ptr + slot.to(tl.int64) * vocab_size + tokens, x, mask=inside)
    most = tl.max(x, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks_ptr + place, tl.where(is_useless, float("nan"), most))
    tl.store(ids_ptr + place, tl.min(tl.where(x == most, tokens, vocab_size), 0))


def _sample_tiles(
    logits: Tensor, changed: Tensor | None, row_metadata: Tensor, peaks: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Per tile of `rows`, the largest score with noise and the first token that has it."""
    vocab_size = logits.shape[1]
    best = tile_tensor(len(rows), vocab_size, logits, torch.float32)
    ids = tile_tensor(len(rows), vocab_size, logits, torch.int32)
    _sample_tiles_kernel[best.shape](
        logits,
        row_metadata if changed is None else changed,
        row_metadata,
        peaks,
        rows,
        best,
        ids,
        logits.stride(0),
        vocab_size,
        ANY_EDITED=changed is not None,
        TILE=TILE,
        TILES=pow2(num_tiles(vocab_size)),
        enable_fp_fusion=False,
    )
    return best, ids


@triton.jit
def _sample_tiles_kernel(
    logits_ptr,
    edited_ptr,
    metadata_ptr,
    peaks_ptr,
    rows_ptr,
    best_ptr,
    ids_ptr,
    stride,
    vocab_size,
    ANY_EDITED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program for each tile of each of the rows."""
    row, first = tl.load(rows_ptr + tl.program_id(0)), tl.program_id(1) * TILE
    num_tiles = tl.num_programs(1)
    top = largest_of_row(peaks_ptr, row, num_tiles, TILES)
    temperature = load_float_field(metadata_ptr, row, TEMPERATURE)
    least = load_float_field(metadata_ptr, row, MIN_SCORE)
    peak = tl.load(peaks_ptr + row * num_tiles + tl.program_id(1))
    most = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int32)
    if tl.div_rn(peak - top, temperature) >= least:  # false for most tiles: the filters keep none of their tokens
        tokens = first + tl.arange(0, TILE)
        slot = load_field(metadata_ptr, row, EDITED)
        x = final_logits(logits_ptr, edited_ptr, row, slot, stride, tokens, vocab_size, ANY_EDITED)
        scores = tl.div_rn(x - top, temperature)
        noise = gumbel(
            load_field(metadata_ptr, row, SEED_LOW),
            load_field(metadata_ptr, row, SEED_HIGH),
            load_field(metadata_ptr, row, POSITION),
            load_field(metadata_ptr, row, SAMPLE_INDEX),
            _SAMPLE,
            first,
            TILE,
        )
        noisy = tl.where(scores >= least, scores + noise, float("-inf"))
        most = tl.max(noisy, 0)
        best = tl.min(tl.where(noisy == most, tokens, vocab_size), 0)
    place = tl.program_id(0) * num_tiles + tl.program_id(1)
    tl.store(best_ptr + place, most)
    tl.store(ids_ptr + place, best)


@triton.jit
def _choose(peaks_ptr, ids_ptr, best_ptr, best_ids_ptr, metadata_ptr, out_ptr, num_tiles, TILES: tl.constexpr):
    """The token of each row: the smallest id with the best score of all tiles; -1 if nothing can be sampled."""
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    values = tl.load(peaks_ptr + row * num_tiles + tiles, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_tiles + tiles, mask=inside, other=0)
    is_useless = tl.max(((values != values) | (values == float("inf"))).to(tl.int32), 0) > 0
    is_useless = is_useless | (tl.max(values, 0) == float("-inf"))
    drawn = load_field(metadata_ptr, row, RANDOM_ROW)
    if drawn >= 0:
        values = tl.load(best_ptr + drawn * num_tiles + tiles, mask=inside, other=float("-inf"))
        ids = tl.load(best_ids_ptr + drawn * num_tiles + tiles, mask=inside, other=0)
    best = tl.min(tl.where(values == tl.max(values, 0), ids, 2147483647), 0)
    tl.store(out_ptr + row, tl.where(is_useless, -1, best).to(tl.int64))

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

from quire.kernels.contract import Draws, Purpose
from quire.kernels.triton.edits import count_history, edit_columns, edited, numbered
from quire.kernels.triton.launch import pow2
from quire.kernels.triton.noise import gumbel
from quire.kernels.triton.rows import (
    DRAWN,
    EDITED,
    LEAST,
    POSITION,
    SAMPLE_INDEX,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TILE,
    WISH,
    final_logits,
    float_wish,
    largest_of_row,
    num_tiles,
    raw_logits,
    readable,
    tile_tensor,
    wish,
)
from quire.kernels.triton.thresholds import raise_least
from quire.kernels.triton.upload import upload

_SAMPLE = tl.constexpr(int(Purpose.SAMPLE))


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """One token per row of logits (num_rows, vocab_size) -> int64 (num_rows,); -1 if nothing can be sampled."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    logits = readable(logits)
    table = wishes_of(draws, vocab_size)
    edits = edit_columns(draws, table, vocab_size)
    random = np.flatnonzero(draws.temperatures > 0).astype(np.int32)
    filtered = random[(table["top_k"][random] > 0) | (table["top_p"][random] < 1)]
    wishes, random_rows, filtered_rows, *told = upload([table, random, filtered, *edits], logits.device)
    changed, peaks, ids = find_peaks(logits, wishes, told, table)
    best, best_ids = peaks, ids
    if len(random):
        if len(filtered):
            raise_least(logits, changed, wishes, peaks, filtered_rows)
        best, best_ids = _draw(logits, changed, wishes, peaks, random_rows)
    tiles = num_tiles(vocab_size)
    _choose[(num_rows,)](peaks, ids, best, best_ids, wishes, out, tiles, TILES=pow2(tiles), num_warps=1)
    return out


def wishes_of(draws: Draws, vocab_size: int) -> np.ndarray:
    """The sampling metadata as an array of WISH, one entry per row, without the fields of edits."""
    wishes = np.zeros(len(draws.seeds), WISH)
    for name, column in (
        ("temperature", draws.temperatures),
        ("top_p", draws.top_ps),
        ("repetition", draws.repetition_penalties),
        ("frequency", draws.frequency_penalties),
        ("presence", draws.presence_penalties),
        ("seed_low", draws.seeds & np.uint64(0xFFFFFFFF)),
        ("seed_high", draws.seeds >> np.uint64(32)),
        ("position", draws.positions),
        ("sample_index", draws.sample_indices),
    ):
        wishes[name] = column
    wishes["top_k"] = np.where(draws.top_ks < vocab_size, np.maximum(draws.top_ks, 0), 0)
    wishes["least"] = torch.from_numpy(draws.min_ps.copy()).log().numpy()  # rounded as the reference's
    wishes["mask"] = -1
    wishes["drawn"] = numbered(len(wishes), np.flatnonzero(draws.temperatures > 0))
    return wishes


def find_peaks(
    logits: Tensor, wishes: Tensor, told: list[Tensor], table: np.ndarray
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The edited logits or None, and per tile the largest logit after edits and the first token that has it.

    told: the arrays of `edit_columns`, on the device. The largest logit is NaN if the input tile has NaN or +inf.
    """
    num_rows, vocab_size = logits.shape
    num_edited, num_counted = (int(table[name].max()) + 1 for name in ("edited", "counted"))
    masks, tokens, values, begins, rows, entries = told
    counts = count_history(rows, entries, num_counted, vocab_size) if num_counted else wishes
    changed = torch.empty(num_edited, vocab_size, device=logits.device) if num_edited else None
    peaks = tile_tensor(num_rows, vocab_size, logits, torch.float32)
    ids = tile_tensor(num_rows, vocab_size, logits, torch.int32)
    _peaks[peaks.shape](
        logits,
        wishes if changed is None else changed,
        wishes,
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
    wishes_ptr,
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
        slot = wish(wishes_ptr, row, EDITED)
        if slot >= 0:
            x = edited(
                x, tokens, row, slot, wishes_ptr, masks_ptr, tokens_ptr, values_ptr, begins_ptr, counts_ptr, vocab_size
            )
            tl.store(edited_ptr + slot.to(tl.int64) * vocab_size + tokens, x, mask=inside)
    most = tl.max(x, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks_ptr + place, tl.where(is_useless, float("nan"), most))
    tl.store(ids_ptr + place, tl.min(tl.where(x == most, tokens, vocab_size), 0))


def _draw(logits: Tensor, changed: Tensor | None, wishes: Tensor, peaks: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Per tile of `rows`, the largest score with noise and the first token that has it."""
    vocab_size = logits.shape[1]
    best = tile_tensor(len(rows), vocab_size, logits, torch.float32)
    ids = tile_tensor(len(rows), vocab_size, logits, torch.int32)
    _draw_tiles[best.shape](
        logits,
        wishes if changed is None else changed,
        wishes,
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
def _draw_tiles(
    logits_ptr,
    edited_ptr,
    wishes_ptr,
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
    temperature = float_wish(wishes_ptr, row, TEMPERATURE)
    least = float_wish(wishes_ptr, row, LEAST)
    peak = tl.load(peaks_ptr + row * num_tiles + tl.program_id(1))
    most = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int32)
    if tl.div_rn(peak - top, temperature) >= least:  # false for most tiles: the filters keep none of their tokens
        tokens = first + tl.arange(0, TILE)
        slot = wish(wishes_ptr, row, EDITED)
        x = final_logits(logits_ptr, edited_ptr, row, slot, stride, tokens, vocab_size, ANY_EDITED)
        scores = tl.div_rn(x - top, temperature)
        noise = gumbel(
            wish(wishes_ptr, row, SEED_LOW),
            wish(wishes_ptr, row, SEED_HIGH),
            wish(wishes_ptr, row, POSITION),
            wish(wishes_ptr, row, SAMPLE_INDEX),
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
def _choose(peaks_ptr, ids_ptr, best_ptr, best_ids_ptr, wishes_ptr, out_ptr, num_tiles, TILES: tl.constexpr):
    """The token of each row: the smallest id with the best score of all tiles; -1 if nothing can be sampled."""
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    values = tl.load(peaks_ptr + row * num_tiles + tiles, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_tiles + tiles, mask=inside, other=0)
    is_useless = tl.max(((values != values) | (values == float("inf"))).to(tl.int32), 0) > 0
    is_useless = is_useless | (tl.max(values, 0) == float("-inf"))
    drawn = wish(wishes_ptr, row, DRAWN)
    if drawn >= 0:
        values = tl.load(best_ptr + drawn * num_tiles + tiles, mask=inside, other=float("-inf"))
        ids = tl.load(best_ids_ptr + drawn * num_tiles + tiles, mask=inside, other=0)
    best = tl.min(tl.where(values == tl.max(values, 0), ids, 2147483647), 0)
    tl.store(out_ptr + row, tl.where(is_useless, -1, best).to(tl.int64))

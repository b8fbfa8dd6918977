"""Rows of logits and their sampling metadata, as the sampling kernels read them."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # logits of a tile; most kernels run one program per tile of a row

# Sampling metadata of a row: 32-bit words, with the same layout on host and device.
ROW_METADATA = np.dtype(
    [
        ("temperature", np.float32),
        ("min_score", np.float32),  # threshold: lower scores are filtered out, see `thresholds`
        ("top_p", np.float32),
        ("top_k", np.int32),  # 0 keeps all
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("position", np.int32),
        ("sample_index", np.int32),
        ("edited", np.int32),  # the row's index in the edited logits; -1 is none, here and below
        ("mask", np.int32),  # index in the masks
        ("counted", np.int32),  # index in the token counts
        ("random_row", np.int32),  # index among the rows with a temperature above 0
        ("unused", np.int32),
    ]
)

# Word offsets of the fields, in the same order
WORDS = tl.constexpr(ROW_METADATA.itemsize // 4)
TEMPERATURE, MIN_SCORE, TOP_P, TOP_K, REPETITION, FREQUENCY, PRESENCE, SEED_LOW = (tl.constexpr(i) for i in range(8))
SEED_HIGH, POSITION, SAMPLE_INDEX, EDITED, MASK, COUNTED, RANDOM_ROW = (tl.constexpr(i) for i in range(8, 15))


@triton.jit
def load_field(metadata_ptr, row, name: tl.constexpr) -> tl.tensor:
    """A metadata field of a row, as int32. name: its word offset."""
    return tl.load(metadata_ptr + row * WORDS + name)


@triton.jit
def load_float_field(metadata_ptr, row, name: tl.constexpr) -> tl.tensor:
    """A float32 metadata field of a row. name: its word offset."""
    return load_field(metadata_ptr, row, name).to(tl.float32, bitcast=True)


@triton.jit
def raw_logits(logits_ptr, row, stride, tokens, inside) -> tl.tensor:
    """Logits of a row in float32; -inf where `inside` is false."""
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + tokens, mask=inside, other=0.0)
    return tl.where(inside, x.to(tl.float32), float("-inf"))


@triton.jit
def final_logits(logits_ptr, edited_ptr, row, slot, stride, tokens, vocab_size, ANY_EDITED: tl.constexpr) -> tl.tensor:
    """Logits of a row after edits, -inf after the end of the row. slot: the row's field EDITED."""
    inside = tokens < vocab_size
    if ANY_EDITED:
        places = edited_ptr + slot.to(tl.int64) * vocab_size + tokens
        changed = tl.load(places, mask=inside & (slot >= 0), other=0.0)
        x = tl.where(slot < 0, raw_logits(logits_ptr, row, stride, tokens, inside & (slot < 0)), changed)
        x = tl.where(inside, x, float("-inf"))
    else:
        x = raw_logits(logits_ptr, row, stride, tokens, inside)
    return x


@triton.jit
def largest_of_row(peaks_ptr, row, num_tiles, TILES: tl.constexpr) -> tl.tensor:
    """The largest logit of a row, from the largest of each tile."""
    tiles = tl.arange(0, TILES)
    return tl.max(tl.load(peaks_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf")), 0)


def with_contiguous_rows(logits: Tensor) -> Tensor:
    """Logits with contiguous rows. A copy if they are not."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def num_tiles(vocab_size: int) -> int:
    """The number of tiles of a row."""
    return -(-vocab_size // TILE)


def tile_tensor(num_rows: int, vocab_size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor (num_rows, tiles) on the device of `like`."""
    return torch.empty(num_rows, num_tiles(vocab_size), dtype=dtype, device=like.device)

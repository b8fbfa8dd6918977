"""Logprobs, without waiting for the device. `quire.kernels.reference.likelihood` specifies them.

Every kernel computes a value as (logit - largest logit) - log(sum), each rounded to float32, so that equal logits have
equal values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import pow2
from quire.kernels.triton.rows import TILE, num_tiles, raw_logits, tile_tensor, with_contiguous_rows
from quire.kernels.triton.upload import to_device


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values of `tokens`, ranks of their first column, ids and values of the k most likely: see Kernels.logprobs.

    Raises ValueError for shapes that do not fit the logits. Tokens on the host outside of the vocabulary raise
    IndexError; tokens on the device are not checked.
    """
    num_rows, vocab_size = logits.shape
    if tokens.shape[0] != num_rows or not tokens.shape[1] or not 0 <= k <= vocab_size:
        raise ValueError(f"{tuple(tokens.shape)} tokens and {k} likely ones do not fit logits {tuple(logits.shape)}")
    if tokens.device.type == "cpu" and num_rows and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise IndexError(f"tokens must be in [0, {vocab_size}), not {int(tokens.min())} to {int(tokens.max())}")
    logits, tokens = with_contiguous_rows(logits), to_device(tokens, logits.device)
    norms = _norms(logits)
    own = _values(logits, norms, tokens)
    ranks, keys = _compare(logits, norms, own, with_keys=k > 0)
    ids = keys.topk(k).indices if k else keys
    return own, ranks, ids.int(), _values(logits, norms, ids)


def _values(logits: Tensor, norms: Tensor, tokens: Tensor) -> Tensor:
    return (logits.gather(1, tokens).float() - norms[:, :1]) - norms[:, 1:]


def _norms(logits: Tensor) -> Tensor:
    """float32 (num_rows, 2): the largest logit, and the logarithm of the sum of exp(logit - largest logit).

    The logarithm is NaN for rows whose values are NaN by the contract.
    """
    num_rows, vocab_size = logits.shape
    tiles = num_tiles(vocab_size)
    peaks, sums = (tile_tensor(num_rows, vocab_size, logits, torch.float32) for _ in range(2))
    norms = torch.empty(num_rows, 2, device=logits.device)
    if num_rows:
        _sum_tiles[peaks.shape](logits, peaks, sums, logits.stride(0), vocab_size, TILE=TILE)
        _sum_rows[(num_rows,)](peaks, sums, norms, tiles, TILES=pow2(tiles), num_warps=1)
    return norms


@triton.jit
def _sum_tiles(logits_ptr, peaks_ptr, sums_ptr, stride, vocab_size, TILE: tl.constexpr):
    """Per tile and row, the largest logit and the sum of exp(logit - largest); NaN if the tile has NaN or +inf."""
    row = tl.program_id(0)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = raw_logits(logits_ptr, row, stride, tokens, tokens < vocab_size)
    is_useless = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) > 0
    most = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(most == float("-inf"), 0.0, most)), 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks_ptr + place, most)
    tl.store(sums_ptr + place, tl.where(is_useless, float("nan"), total))


@triton.jit
def _sum_rows(peaks_ptr, sums_ptr, norms_ptr, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    peaks = tl.load(peaks_ptr + row * num_tiles + tiles, mask=inside, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_tiles + tiles, mask=inside, other=0.0)
    most = tl.max(peaks, 0)
    is_useless = (tl.max((sums != sums).to(tl.int32), 0) > 0) | (most == float("-inf"))
    total = tl.sum((sums * tl.exp(peaks - most)).to(tl.float64), 0).to(tl.float32)
    tl.store(norms_ptr + row * 2, most)
    tl.store(norms_ptr + row * 2 + 1, tl.where(is_useless, float("nan"), tl.log(total)))


def _compare(logits: Tensor, norms: Tensor, own: Tensor, *, with_keys: bool) -> tuple[Tensor, Tensor]:
    """Ranks int32 (num_rows,): 1 + the number of values that are larger than the first of `own`; and sort keys.

    Keys are int64 (num_rows, vocab_size), or (num_rows, 0) without `with_keys`. They are distinct within a row, and
    descend by value, then ascend by id.
    """
    num_rows, vocab_size = logits.shape
    larger = tile_tensor(num_rows, vocab_size, logits, torch.int32)
    keys = torch.empty(num_rows, vocab_size if with_keys else 0, dtype=torch.int64, device=logits.device)
    if num_rows:
        _compare_tiles[larger.shape](
            logits,
            norms,
            own,
            larger,
            keys if with_keys else larger,
            logits.stride(0),
            own.shape[1],
            vocab_size,
            WITH_KEYS=with_keys,
            TILE=TILE,
        )
    return larger.sum(1, dtype=torch.int32) + 1, keys


@triton.jit(do_not_specialize=["num_own"])
def _compare_tiles(
    logits_ptr,
    norms_ptr,
    own_ptr,
    larger_ptr,
    keys_ptr,
    stride,
    num_own,
    vocab_size,
    WITH_KEYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (num_rows, tiles)."""
    row = tl.program_id(0)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tokens < vocab_size
    x = raw_logits(logits_ptr, row, stride, tokens, inside)
    values = (x - tl.load(norms_ptr + row * 2)) - tl.load(norms_ptr + row * 2 + 1)
    are_larger = inside & (values > tl.load(own_ptr + row * num_own))
    tl.store(larger_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.sum(are_larger.to(tl.int32), 0))
    if WITH_KEYS:
        values = tl.where(values == 0, 0.0, values)  # turns -0.0 into 0.0, which it is equal to
        bits = values.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)  # in the order of the floats
        tl.store(
            keys_ptr + row.to(tl.int64) * vocab_size + tokens,
            (order << 32) + (4294967295 - tokens.to(tl.int64)),
            mask=inside,
        )

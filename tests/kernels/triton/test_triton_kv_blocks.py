"""KV blocks of the Triton kernels have the reference's content, in all types."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE

from quire.kernels import reference
from quire.kernels.contract import DTYPES, Batch
from quire.kernels.reference.quantized import MAX_QUANTIZED, dequantize, quantize

pytest.importorskip("triton")
from triton_kernel_pairs import ALL, NUM_BLOCKS, Pair, group_of

from quire.kernels.triton import blocks
from quire.kernels.triton.plan import plan

SEEDS = st.integers(0, 2**32 - 1)
STORED = [*DTYPES, *MAX_QUANTIZED]

drawn = settings(deadline=None, max_examples=8)


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    torch.use_deterministic_algorithms(mode=True)  # fills what torch.empty gives
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(mode=False)


@st.composite
def groups(draw):
    """A KV group of one or two layers, and a block size."""
    head_dim = draw(st.sampled_from([16, 20, 64, 80, 96]))
    layers, heads = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    group = group_of(draw(st.sampled_from(STORED)), layers=layers, heads=heads, head_dim=head_dim)
    return group, draw(st.sampled_from([16, 16, 48]))


@drawn
@given(groups(), st.integers(1, 12), st.sampled_from([1, 0.5, 0.25]), st.sampled_from(sorted(DTYPES)), SEEDS)
def test_tokens_are_rotated_and_stored_and_what_lies_behind_them_is_cleared(group, num_heads, share, dtype, seed):
    pair = Pair(*group, seed)
    half = int(share * pair.group.kind.head_dim / 2)
    pair.write(pair.batch(), num_heads, half, DTYPES[dtype], layer=len(pair.group.layers) - 1)


@pytest.mark.parametrize("stored", ["bfloat16", *MAX_QUANTIZED])
def test_tokens_of_a_model_of_common_sizes_are_stored(stored):
    pair = Pair(group_of(stored, layers=1, heads=8, head_dim=128), 16)
    batch = Batch(np.array([14, 32, 7]), np.array([20, 33, 8]), np.array([[4, 9, -1], [-1, -1, 2], [11, -1, -1]]))
    pair.write(batch, 32, 64, torch.bfloat16)


@pytest.mark.parametrize("stored", STORED)
def test_the_first_token_of_a_block_clears_no_token_of_its_sequence(stored):
    """Chunks of one token each, whose programs run in any order: here the last token is stored first."""
    whole, divided = (Pair(group_of(stored), 16) for _ in range(2))
    q, k, v = whole.qkv(6, 4, DTYPES.get(stored, torch.bfloat16))
    batch = Batch(np.array([14]), np.array([20]), np.array([[4, 9]]))
    blocks.rotary_write(whole.fast, 0, q, k, v, None, plan(batch, whole.fast))
    positions = np.arange(14, 20)[::-1]
    ends, tables = np.full(6, 20), np.repeat(batch.tables, 6, 0)
    parts = Batch(positions.copy(), positions + 1, tables, ends=ends)
    blocks.rotary_write(divided.fast, 0, *(x.flip(0) for x in (q, k, v)), None, plan(parts, divided.fast))
    assert torch.equal(divided.fast.data.view(torch.uint8), whole.fast.data.view(torch.uint8))


@pytest.mark.parametrize("stored", STORED)
def test_an_odd_head_is_stored_whole(stored):
    pair = Pair(group_of(stored, head_dim=19), 16)
    pair.write(Batch(np.array([0]), np.array([3]), np.array([[5]])), 3, 4, torch.float32, layer=1)


@pytest.mark.parametrize("stored", STORED)
def test_without_a_rotation_tokens_are_only_stored(stored):
    pair = Pair(group_of(stored, heads=3), 16)
    batch = Batch(np.array([16, 3]), np.array([19, 4]), np.array([[0, 7], [6, 1]]))
    q, k, v = pair.qkv(4, 6, DTYPES.get(stored, torch.bfloat16))
    assert blocks.rotary_write(pair.fast, 1, q, k, v, None, plan(batch, pair.fast)) is q
    pair.store(1, k.cpu(), v.cpu(), batch)
    pair.check()


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_a_sequence_without_a_block_is_rotated_and_stored_nowhere(stored):
    pair = Pair(group_of(stored), 16)
    tables = np.array([[-1, -1], [3, -1], [-1, 8], [5, -1]])
    batch = Batch(np.array([0, 15, 15, 16]), np.array([1, 17, 17, 17]), tables)
    pair.write(batch, 4, 10, torch.float32, layer=1)  # block -1 would be a block of layer 0


def test_heads_that_lie_apart_are_stored_too():
    pair = Pair(group_of("float32"), 16)
    batch = Batch(np.array([0]), np.array([3]), np.array([[5]]))
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in pair.qkv(3, 4, torch.float32))
    blocks.rotary_write(pair.fast, 0, q, k, v, None, plan(batch, pair.fast))
    pair.store(0, k.cpu(), v.cpu(), batch)
    pair.check()


@pytest.mark.parametrize("stored", [*MAX_QUANTIZED])
def test_numbers_between_two_of_8_bits_become_the_nearest_and_halves_the_even_one(stored):
    pair = Pair(group_of(stored, heads=1, head_dim=64), 16)
    grid = torch.arange(-128, 128, dtype=torch.int8).view(torch.float8_e4m3fn).float()
    grid = grid[grid.isfinite()].unique() if stored == "fp8_e4m3" else torch.arange(-127, 128).float()
    halves = (grid[1:] + grid[:-1]) / 2
    numbers = torch.cat((grid, halves, halves.nextafter(grid[1:]), halves.nextafter(grid[:-1]), torch.zeros(64)))
    rows = numbers[: len(numbers) // 63 * 63].view(-1, 1, 63)
    rows = torch.cat((rows, torch.full((len(rows), 1, 1), MAX_QUANTIZED[stored])), -1)  # so that scales are 1
    batch = Batch(np.array([0]), np.array([len(rows)]), np.array([[5, 2, 8]]))
    k, v = rows.to(DEVICE), -rows.to(DEVICE)
    blocks.rotary_write(pair.fast, 0, k, k, v, None, plan(batch, pair.fast))
    pair.store(0, rows, -rows, batch)
    pair.check()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy in the interpreter: inf / inf
@pytest.mark.parametrize("stored", [*MAX_QUANTIZED])
def test_scales_suit_numbers_of_any_size_and_tell_of_those_that_are_none(stored):
    pair = Pair(group_of(stored, heads=1), 16)
    rows = pair.normal(16, 1, 20)
    rows *= torch.tensor([1e-45, 1e-43, 1e-40, 1e-30, 1e-10, 1, 1e10, 1e30, 0, 1e37, *[1] * 6])[:, None, None]
    rows[10, 0, 3], rows[11, 0, 7], rows[12, 0, 12], rows[13, 0, 19] = torch.nan, torch.inf, -torch.inf, torch.nan
    batch = Batch(np.array([0]), np.array([16]), np.array([[5]]))
    blocks.rotary_write(pair.fast, 0, *[rows.to(DEVICE)] * 3, None, plan(batch, pair.fast))
    seen = dequantize(blocks.pack(pair.fast, ALL).cpu()[0, 0, 5], stored)
    expected = dequantize(quantize(rows, stored), stored)
    usable = rows.isfinite().all(-1)
    assert torch.equal(seen[usable], expected[usable])
    assert not seen[~usable].isfinite().any()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("head_dim", [18, 64])
def test_pack_and_unpack_are_those_of_the_reference(stored, head_dim):
    pair = Pair(group_of(stored, heads=3, head_dim=head_dim), 16)
    pair.check()
    some = torch.tensor([7, 0, 11, 3])
    canonical = blocks.pack(pair.fast, some.to(DEVICE))
    assert canonical.is_contiguous()
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}  # NaN of another device has other bits
    torch.testing.assert_close(canonical.cpu(), pair.slow.data[:, :, some], **exact)
    blocks.unpack(pair.fast, some.to(DEVICE), canonical.flip(2))
    reference.unpack(pair.slow, some, canonical.cpu().flip(2))
    pair.check()


@drawn
@given(groups(), SEEDS)
def test_copies_are_those_of_the_reference(group, seed):
    pair = Pair(*group, seed)
    order = torch.randperm(NUM_BLOCKS, generator=pair.random)
    apart = torch.stack((order[:3], order[3:6]), 1)
    for pairs, num_tokens in (
        (apart, pair.number(0, pair.block_size)),
        (apart[:1].to(DEVICE), pair.number(1, pair.block_size)),
        (apart[:, :1].expand(-1, 2), pair.number(1, pair.block_size)),  # only clears
        (apart[1:2], pair.block_size),
        (apart[:0], 3),
    ):
        blocks.copy_blocks(pair.fast, pairs, num_tokens)
        reference.copy_blocks(pair.slow, pairs.cpu(), num_tokens)
        pair.check()


@pytest.mark.parametrize("stored", STORED)
def test_a_block_may_be_copied_and_overwritten_by_one_call(stored):
    pair = Pair(group_of(stored, layers=1, heads=3, head_dim=64), 16)
    pairs = torch.stack((torch.arange(8), torch.arange(8).roll(3)), 1)
    blocks.copy_blocks(pair.fast, pairs, 11)
    reference.copy_blocks(pair.slow, pairs, 11)
    pair.check()


@pytest.mark.parametrize("stored", STORED)
def test_blocks_start_as_zeros(stored):
    group = group_of(stored)
    canonical = blocks.pack(blocks.allocate(group, 16, DEVICE), ALL.to(DEVICE))
    in_8_bits = stored in MAX_QUANTIZED
    assert canonical.dtype == (torch.uint8 if in_8_bits else DTYPES[stored])
    assert canonical.shape == (2, 2, NUM_BLOCKS, 16, 2, 24 if in_8_bits else 20)
    assert not canonical.any()


def test_sizes_and_types_of_kv_that_do_not_match_are_refused():
    storage = blocks.allocate(group_of("float32"), 16, DEVICE)
    step = plan(Batch(np.array([0]), np.array([2]), np.array([[0]])), storage)
    k, angles = torch.ones(2, 2, 20, device=DEVICE), torch.ones(2, 11, device=DEVICE)
    with pytest.raises(ValueError, match="multiple of 16"):
        blocks.allocate(group_of("float32"), 24, DEVICE)
    with pytest.raises(ValueError, match="float64"):
        blocks.allocate(group_of("float64"), 16, DEVICE)
    with pytest.raises(ValueError, match="cannot hold"):
        blocks.rotary_write(storage, 0, k, k[:, :1], k[:, :1], None, step)
    with pytest.raises(ValueError, match="do not match"):
        blocks.rotary_write(storage, 0, k, k, k[:1], None, step)
    with pytest.raises(ValueError, match="do not match"):
        blocks.rotary_write(storage, 0, k[:1], k[:1], k[:1], None, step)
    with pytest.raises(ValueError, match="22 rotated"):
        blocks.rotary_write(storage, 0, k, k, k, (angles, angles), step)
    with pytest.raises(IndexError, match="layer 2"):
        blocks.rotary_write(storage, 2, k, k, k, None, step)

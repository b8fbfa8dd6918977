"""KV blocks of the CPU kernels have the reference's content, for every build and number of threads."""

import gc
from functools import cache
from pathlib import Path

import pytest
import torch
from cpu_kernel_builds import each_with, in_use
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_groups import kv_group

from quire.kernels import reference
from quire.kernels.reference.quantized import from_stored, stored_dtype_and_size, to_stored
from quire.kernels.reference.rowwise import rotary

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
cpu = pytest.importorskip("quire.kernels.cpu.blocks")
memory = pytest.importorskip("quire.kernels.cpu.memory")

CPU = torch.device("cpu")
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = sorted([*NAMES, "int8", "fp8_e4m3", "int4"])
SEEDS = st.integers(0, 2**32 - 1)
NUM_BLOCKS = 7


@pytest.fixture(scope="module", params=each_with(1, 2))
def build(request):
    with in_use(request.param) as threads:
        yield threads


each_build = pytest.mark.usefixtures("build")
drawn = settings(deadline=None, max_examples=12)


@each_build
def test_new_memory_is_poisoned_here():
    assert memory.empty((3, 5), torch.float32).isnan().all()
    assert torch.empty(3, 5).isnan().all()


@st.composite
def groups(draw):
    """A KV group of one to three layers, and a block size."""
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([2, 8, 20, 64, 80, 96, 128, 512]))
    dtype = draw(st.sampled_from(STORED))
    return kv_group(tuple(range(layers)), heads, head_dim, dtype, NUM_BLOCKS, 1), draw(st.sampled_from([16, 32, 48]))


@cache
def canonical_of(group, shape, dtype, seed):
    """Stored numbers, the same for all builds, and the state of the generator that drew them."""
    random = torch.Generator().manual_seed(seed)
    numbers, choice = (torch.randn((*shape[:-1], group.kind.head_dim), generator=random) for _ in range(2))
    return to_stored(numbers.to(dtype).where(choice <= 2, torch.nan), group.dtype), random.get_state()


class Pair:
    """A storage of each module with the same random bytes, some of them NaN."""

    def __init__(self, group, block_size, seed):
        self.group, self.block_size = group, block_size
        self.random = torch.Generator().manual_seed(seed)
        self.dtype = NAMES.get(group.dtype, torch.bfloat16)  # of inputs
        self.fast, self.slow = cpu.allocate(group, block_size, CPU), reference.allocate(group, block_size, CPU)
        canonical, state = canonical_of(group, self.slow.data.shape, self.dtype, seed)
        self.random.set_state(state)
        cpu.unpack(self.fast, torch.arange(NUM_BLOCKS), canonical)
        reference.unpack(self.slow, torch.arange(NUM_BLOCKS), canonical)

    def normal(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.random).to(dtype or self.dtype)

    def number(self, low, high):
        return int(torch.randint(low, high + 1, (), generator=self.random))

    def check(self):
        """Asserts equal bits everywhere, and zeros in the padding of each head."""
        blocks = torch.arange(NUM_BLOCKS)
        fast, slow = cpu.pack(self.fast, blocks), reference.pack(self.slow, blocks)
        assert fast.shape == slow.shape
        assert torch.equal(fast.nan_to_num(123), slow.nan_to_num(123))
        assert zeros_behind_heads(self.fast)

    def step(self):
        """Slots of some sequences, each with blocks of its own, and the blocks whose first slot is written."""
        blocks = torch.randperm(NUM_BLOCKS, generator=self.random).tolist()
        slots = []
        while blocks and (not slots or self.number(0, 3)):
            start = self.number(0, self.block_size - 1)
            taken = [blocks.pop() for _ in range(min(len(blocks), self.number(1, 3)))]
            places = [block * self.block_size + i for block in taken for i in range(self.block_size)]
            slots += places[start : len(places) - self.number(0, self.block_size - 1)] or [places[start]]
        slots = torch.tensor(slots)
        return slots, slots[slots % self.block_size == 0] // self.block_size

    def store(self, layer, k, v, slots, begun):
        """Store as `reference.paged.write_kv` does."""
        self.slow.data[layer][:, begun] = 0
        self.slow.data[layer].flatten(1, 2)[:, slots] = to_stored(torch.stack((k, v)), self.group.dtype)


def zeros_behind_heads(storage):
    """Whether the padding of heads is zero, by the documented layout."""
    group, depth = storage.group, cpu.padded_head_dim(storage.group.kind.head_dim, storage.group.dtype)
    if group.dtype == "int4":  # rotated heads have no padding, and are compared as they are
        return True
    keys, values = storage.data[:, 0, ..., : 16 * depth], storage.data[:, 1, ..., : 16 * depth]
    terms = 4 // storage.data.itemsize
    keys = keys.unflatten(-1, (depth // terms, 16, terms))
    keys = keys[..., [0, 2, 1, 3]] if group.dtype == "fp8_e4m3" else keys
    if group.dtype == "int8":  # stored as key + 128, and zeroed memory stays zero
        keys = torch.where(keys == 128, 0, keys)
    keys = keys.transpose(-1, -2).flatten(-3, -2)
    values = values.unflatten(-1, (16 // terms, depth, terms))
    return not keys[..., group.kind.head_dim :, :].any() and not values[..., group.kind.head_dim :, :].any()


def qkv(pair, num_tokens, heads, dtype):
    """Queries, keys and values as views of one product."""
    kv_heads = pair.group.kind.num_kv_heads
    product = pair.normal(num_tokens, heads + 2 * kv_heads, pair.group.kind.head_dim, dtype=dtype)
    return product.tensor_split((heads, heads + kv_heads), 1)


@each_build
@drawn
@given(groups(), SEEDS, st.sampled_from(sorted(NAMES)))
def test_tokens_are_stored_as_in_the_reference(group, seed, name):
    pair = Pair(*group, seed)
    for layer in range(len(pair.group.layers)):
        slots, begun = pair.step()
        _, k, v = qkv(pair, len(slots), 1, NAMES[name])
        cpu.write_kv(pair.fast, layer, k, v, slots)
        pair.store(layer, k, v, slots, begun)
        pair.check()


@each_build
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("head_dim", [20, 64, 80, 512])
def test_special_heads_are_stored_as_in_the_reference(dtype, head_dim):
    pair = Pair(kv_group((0,), 1, head_dim, dtype, NUM_BLOCKS, 1), 16, 3)
    k = pair.normal(9, 1, head_dim, dtype=torch.float32)
    k[0], k[1], k[2, :, 1:], k[3], k[4] = 0, -2.5, 0, 1e-42, 1e30
    k[5, 0, 3], k[6, 0, 4], k[7, 0, 5] = torch.nan, torch.inf, -torch.inf
    slots = torch.arange(9)
    cpu.write_kv(pair.fast, 0, k, -k, slots)
    pair.store(0, k, -k, slots, torch.zeros(1, dtype=torch.int64))
    fast, slow = (
        from_stored(module.pack(some, torch.zeros(1, dtype=torch.int64)), dtype, head_dim)
        for module, some in ((cpu, pair.fast), (reference, pair.slow))
    )
    torch.testing.assert_close(fast, slow, equal_nan=True, atol=0, rtol=0)
    assert fast[0, :, 0, 5:8].isnan().all()
    assert not fast[0, :, 0, :5].isnan().any() and not fast[0, :, 0, 8].isnan().any()


@each_build
@drawn
@given(groups(), SEEDS, st.sampled_from(sorted(NAMES)), st.floats(0, 1))
def test_rotated_tokens_are_those_of_rotary_stored(group, seed, name, share):
    pair, other = Pair(*group, seed), Pair(*group, seed)
    slots, begun = pair.step()
    q, k, v = qkv(pair, len(slots), pair.number(1, 5), NAMES[name])
    angles = pair.normal(len(slots), max(1, int(share * q.shape[2] / 2)), dtype=torch.float32)
    before = k.clone()
    rotation = angles.cos(), angles.sin()
    turned = cpu.rotary_write(pair.fast, 0, q, k, v, rotation, slots)
    assert torch.equal(k, before)
    also_turned = cpu.rotary_write(other.fast, 0, k, k, v, rotation, slots)  # keys passed as queries: the same bits
    expected = rotary(q.float(), k.float(), *rotation)
    for result, wanted, x in zip((turned, also_turned), expected, (q, k), strict=True):
        rounding = 2**-8 if result.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(result.float(), wanted, rtol=rounding, atol=1e-6)
        assert torch.equal(result[..., 2 * angles.shape[1] :], x[..., 2 * angles.shape[1] :])
    pair.store(0, also_turned, v, slots, begun)
    pair.check()


@each_build
@drawn
@given(groups(), SEEDS)
def test_without_a_rotation_tokens_are_only_stored(group, seed):
    pair = Pair(*group, seed)
    slots, begun = pair.step()
    q, k, v = qkv(pair, len(slots), 2, pair.dtype)
    assert cpu.rotary_write(pair.fast, 0, q, k, v, None, slots) is q
    pair.store(0, k, v, slots, begun)
    pair.check()


@each_build
@drawn
@given(groups(), SEEDS)
def test_a_token_is_stored_alike_alone_and_in_company(group, seed):
    one, other = Pair(*group, seed), Pair(*group, seed)
    slots, _ = one.step()
    q, k, v = qkv(one, len(slots), 3, one.dtype)
    angles = one.normal(len(slots), one.group.kind.head_dim // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    together = cpu.rotary_write(one.fast, 0, q, k, v, (cos, sin), slots)
    for i in range(len(slots)):
        at = slice(i, i + 1)
        turned = cpu.rotary_write(other.fast, 0, q[at], k[at], v[at], (cos[at], sin[at]), slots[at])
        assert torch.equal(turned, together[at])
    assert torch.equal(one.fast.data.nan_to_num(123), other.fast.data.nan_to_num(123))


@each_build
@drawn
@given(groups(), SEEDS)
def test_pack_and_unpack_are_those_of_the_reference(group, seed):
    pair = Pair(*group, seed)
    pair.check()
    blocks = torch.randperm(NUM_BLOCKS, generator=pair.random)[: pair.number(1, NUM_BLOCKS)]
    canonical = cpu.pack(pair.fast, blocks)
    assert torch.equal(canonical.nan_to_num(123), reference.pack(pair.slow, blocks).nan_to_num(123))
    moved = canonical.flip(2)
    cpu.unpack(pair.fast, blocks, moved)
    reference.unpack(pair.slow, blocks, moved)
    pair.check()


@each_build
@drawn
@given(groups(), SEEDS, st.booleans())
def test_copies_are_those_of_the_reference(group, seed, overlapping):
    pair = Pair(*group, seed)
    order = torch.randperm(NUM_BLOCKS, generator=pair.random)
    pairs = torch.stack((order[:3], order.roll(1)[:3] if overlapping else order[3:6]), 1)
    for num_tokens in (pair.number(0, pair.block_size), pair.block_size, 16):
        cpu.copy_blocks(pair.fast, pairs, num_tokens)
        reference.copy_blocks(pair.slow, pairs, num_tokens)
        pair.check()


def small(dtype="float32"):
    return kv_group((0, 1), 2, 20, dtype, 3, 1)


@each_build
def test_slots_outside_of_the_blocks_are_passed_over():
    storage = cpu.allocate(small(), 16, CPU)
    k = torch.ones(4, 2, 20)
    cpu.write_kv(storage, 0, k, k, torch.tensor([-1, 48, 5, 2**40]))
    expected = torch.zeros(2, 2, 3, 16, 2, 20)
    expected[0, :, 0, 5] = 1
    assert torch.equal(cpu.pack(storage, torch.arange(3)), expected)


@each_build
@pytest.mark.parametrize("dtype", STORED)
def test_blocks_start_as_zeros_in_lines_of_the_cache(dtype):
    storage = cpu.allocate(small(dtype=dtype), 32, CPU)
    stored, width = stored_dtype_and_size(dtype, 32)
    assert storage.data.dtype == stored
    assert storage.data.shape == (2, 2, 3, 2, 2, 16 * width)
    assert storage.data.data_ptr() % 64 == 0
    assert not storage.data.any()
    assert not cpu.pack(storage, torch.arange(3)).any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs to see its own memory")
def test_memory_is_taken_when_written_and_given_back():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    gc.collect()
    before = resident()
    storage = cpu.allocate(kv_group((0, 1), 8, 128, "float32", 4096, 1), 16, CPU)
    assert storage.data.nbytes == 2**30
    assert resident() - before < 2**24
    cpu.write_kv(storage, 1, torch.ones(1, 8, 128), torch.ones(1, 8, 128), torch.tensor([100]))
    assert resident() - before < 2**25
    storage.data.flatten()[: 2**25] = 1
    assert resident() - before > 2**26
    del storage
    assert resident() - before < 2**24


def test_sizes_and_types_of_kv_that_do_not_match_are_refused():
    storage, k = cpu.allocate(small(), 16, CPU), torch.ones(2, 2, 20)
    slots = torch.arange(2)
    with pytest.raises(ValueError, match="multiple of 16"):
        cpu.allocate(small(), 24, CPU)
    with pytest.raises(ValueError, match="float16"):
        cpu.allocate(small(dtype="float16"), 16, CPU)
    with pytest.raises(ValueError, match="meta"):
        cpu.allocate(small(), 16, torch.device("meta"))
    with pytest.raises(ValueError, match="cannot hold"):
        cpu.write_kv(storage, 0, k[..., :8], k[..., :8], slots)
    with pytest.raises(ValueError, match="do not match"):
        cpu.write_kv(storage, 0, k, k[:1], slots)
    with pytest.raises(ValueError, match="do not match"):
        cpu.rotary_write(storage, 0, k, k, k, (torch.ones(1, 10), torch.ones(1, 10)), slots)
    with pytest.raises(IndexError, match="layer 2"):
        cpu.write_kv(storage, 2, k, k, slots)
    with pytest.raises(IndexError, match="not among 3"):
        cpu.pack(storage, torch.tensor([3]))
    with pytest.raises(IndexError, match="not among 3"):
        cpu.copy_blocks(storage, torch.tensor([[0, -1]]), 16)
    with pytest.raises(ValueError, match="does not fit"):
        cpu.unpack(storage, torch.arange(2), torch.ones(2, 2, 3, 16, 2, 20))

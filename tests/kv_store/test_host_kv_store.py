"""The host pool: blocks are unchanged after swap-out and swap-in, in every kernel module's layout."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from kv_groups import kv_group
from triton_device import DEVICE

from quire.config import CacheConfig
from quire.core.kv_groups import KVGroup
from quire.core.step import Move
from quire.kernels import reference
from quire.kernels.cpu import EXTENSION
from quire.kernels.deterministic import DETERMINISTIC as deterministic
from quire.kv_store import host
from quire.kv_store.device import DeviceStore
from quire.kv_store.host import PlainPool, StreamedPool, Swap, _runs, _sorted, host_blocks

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 4


def modules():
    """Kernel modules that are available here, with the module of their blocks."""
    found = [pytest.param((reference, torch.device("cpu")), id="reference")]
    found.append(pytest.param((deterministic, torch.device("cpu")), id="invariant"))
    if EXTENSION is None:
        from quire.kernels.cpu import blocks as cpu  # noqa: PLC0415  (it may not be built)

        found.append(pytest.param((cpu, torch.device("cpu")), id="cpu"))
    try:
        from quire.kernels.triton import blocks as triton  # noqa: PLC0415  (may not be installed)

        found.append(pytest.param((triton, DEVICE), id="triton"))
    except ImportError:
        pass
    return found


def group(dtype: str = "float32") -> KVGroup:
    return kv_group((0, 1, 2), 2, 20, dtype, NUM_BLOCKS, 1, num_host_blocks=NUM_HOST_BLOCKS)


def filled(module, device, dtype="float32"):
    """A storage whose blocks are all different."""
    storage = module.allocate(group(dtype), 16, device)
    blocks = torch.arange(NUM_BLOCKS)
    canonical = module.pack(storage, blocks)
    if canonical.dtype == torch.uint8:
        values = torch.randint(0, 120, canonical.shape, dtype=torch.uint8, device=canonical.device)
    else:
        values = torch.randn(canonical.shape, device=canonical.device).to(canonical.dtype)
    module.unpack(storage, blocks, values)
    return storage


@pytest.mark.parametrize("made", modules())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_bytes_of_a_block_are_its_own_in_every_layout(made, dtype):
    module, device = made
    try:
        storage = filled(module, device, dtype)
    except ValueError as refused:
        assert "not as int8" in str(refused)
        return
    before = module.pack(storage, torch.arange(NUM_BLOCKS)).clone()
    assert storage.by_block.shape[0] == NUM_BLOCKS
    assert storage.by_block.data_ptr() == storage.data.data_ptr(), "a view"
    assert storage.by_block.numel() == storage.data.numel()
    storage.by_block[4] = storage.by_block[1].clone()
    after = module.pack(storage, torch.arange(NUM_BLOCKS))
    assert torch.equal(after[:, :, 4], before[:, :, 1])
    others = [0, 1, 2, 3, 5]
    assert torch.equal(after[:, :, others], before[:, :, others])


@pytest.mark.parametrize("made", [made for made in modules() if made.values[0][1].type == "cpu"])
def test_blocks_come_back_as_they_were_where_both_pools_are_host_memory(made):
    module, device = made
    storage = filled(module, device)
    before = module.pack(storage, torch.arange(NUM_BLOCKS)).clone()
    pool = PlainPool(storage, NUM_HOST_BLOCKS, clock=iter(range(100)).__next__)
    assert pool.swap_out([(5, 0), (0, 3)]).wait() == 1
    storage.by_block[5] = storage.by_block[0] = 0
    assert pool.swap_in([(3, 2), (0, 0)]).wait() == 1
    after = module.pack(storage, torch.arange(NUM_BLOCKS))
    assert torch.equal(after[:, :, [2, 0]], before[:, :, [0, 5]])
    assert torch.equal(after[:, :, [1, 3, 4]], before[:, :, [1, 3, 4]])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs to see its own memory")
def test_host_memory_is_taken_when_it_is_first_written():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    storage = reference.allocate(kv_group((0, 1), 8, 128, "float32", 2, 1), 16, torch.device("cpu"))
    before = resident()
    blocks = host_blocks(storage, 4096, pinned=False)
    assert blocks.nbytes == 2**30 and resident() - before < 2**24
    blocks[7] = 1
    assert resident() - before < 2**25


def test_the_store_does_moves_in_order_and_says_how_long_they_took():
    cache = CacheConfig(16, (group(), group()))
    store = DeviceStore(reference, cache, torch.device("cpu"))
    for storage in store.storages:
        storage.data.normal_()
    old = [reference.pack(storage, torch.arange(NUM_BLOCKS)).clone() for storage in store.storages]
    moves = [
        Move(1, 1, "device", "host", [(2, 3)], 16),
        Move(2, 1, "device", "device", [(4, 2)], 16),  # into the block that was swapped out
        Move(3, 1, "host", "device", [(3, 5)], 16),
        Move(4, 0, "device", "host", [(0, 1)], 5),
    ]
    delay = store.execute(7, moves)
    new = [reference.pack(storage, torch.arange(NUM_BLOCKS)) for storage in store.storages]
    assert torch.equal(new[1][:, :, [5, 2]], old[1][:, :, [2, 4]])
    assert torch.equal(new[0], old[0])
    assert store.end_swaps(6, wait=True) == ([], 0, 0), "of earlier steps"
    ids, out, back = store.end_swaps(7, wait=False)
    assert ids == [1, 3, 4]
    assert out > 0 and back > 0 and out + back == delay and not store.has_copy_stream
    assert store.end_swaps(7, wait=True) == ([], 0, 0)
    with pytest.raises(ValueError, match="to the host and from it"):
        store.execute(9, [Move(1, 0, "device", "disk", [(0, 1)], 16)])


def test_blocks_that_are_neighbours_in_host_memory_travel_together():
    sources, targets = _sorted([(7, 3), (1, 9), (4, 2), (5, 4), (0, 10)], by=1)
    assert (sources.tolist(), targets.tolist()) == ([4, 7, 5, 1, 0], [2, 3, 4, 9, 10])
    assert _runs(targets) == [(0, 2, 3), (3, 9, 2)]
    assert _runs(_sorted([(8, 0)], by=0)[0]) == [(0, 8, 1)]


class Stream:
    """A fake device stream: queued work runs at once and is recorded."""

    def __init__(self, log):
        self.log = log

    def wait_stream(self, other):
        self.log.append("waits for forward passes")

    def wait_event(self, event):
        self.log.append(f"forward passes wait for {event}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("made", modules())
def test_copies_beside_a_device_pass_through_little_memory(made, monkeypatch):
    log, staged = [], []
    storage = filled(*made)
    one = storage.by_block[0].nbytes
    monkeypatch.setattr(host, "STAGING_BYTES", 2 * one + 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(host, "_now", lambda: f"event {len(log)} after {len(staged)} pieces")
    monkeypatch.setattr(host, "_swap", lambda began, ended: Swap(lambda: True, lambda: 0.5))
    monkeypatch.setattr(
        host, "to_device", lambda array, device: (staged.append(len(array)), torch.from_numpy(array))[1]
    )
    monkeypatch.setattr(host, "host_blocks", lambda *args, pinned: host_blocks(*args, pinned=False))
    pool = StreamedPool(storage, NUM_HOST_BLOCKS, Stream(log))
    before = storage.by_block.clone()
    assert pool.swap_out([(5, 0), (0, 3), (1, 1)]).wait() == 0.5
    assert staged == [2, 1]
    assert log == ["waits for forward passes", "forward passes wait for event 1 after 2 pieces"]
    storage.by_block[[0, 1, 5]] = 0
    assert pool.swap_in([(3, 0), (0, 2), (1, 1)]).wait() == 0.5
    assert staged == [2, 1, 2, 1] and len(log) == 3
    for block, was in ((0, 0), (1, 1), (2, 5), (4, 4)):
        assert torch.equal(storage.by_block[block].view(torch.uint8), before[was].view(torch.uint8))
    assert not storage.by_block[5].any()
    assert pool.swap_out([]).wait() == pool.swap_in([]).wait() == 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_beside_a_gpu_read_what_was_there_when_they_were_asked_for():
    from quire.kernels.triton import blocks as triton  # noqa: PLC0415  (needs a GPU)

    storage = filled(triton, DEVICE)
    before = triton.pack(storage, torch.arange(NUM_BLOCKS)).clone()
    pool = StreamedPool(storage, NUM_HOST_BLOCKS, torch.cuda.Stream())
    for _ in range(50):
        left = pool.swap_out([(5, 0), (0, 3)])
        storage.by_block[5] = storage.by_block[0] = 0  # while the copy may still run
        back = pool.swap_in([(3, 0), (0, 5)])
        assert left.wait() >= 0 and back.wait() >= 0
        assert left.is_done() and back.is_done()
        torch.cuda.synchronize()
        assert torch.equal(triton.pack(storage, torch.arange(NUM_BLOCKS)), before)

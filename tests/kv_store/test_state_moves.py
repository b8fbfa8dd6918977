"""Moves of state blocks: within the device, to the host pool and back, beside those of KV blocks."""

from contextlib import nullcontext

import pytest
import torch
from kv_groups import kv_group

from quire.config import CacheConfig
from quire.core.states import StateGroup, StateKind
from quire.core.step import Move
from quire.kernels import reference
from quire.kv_store import host
from quire.kv_store.device import DeviceStore
from quire.kv_store.host import StreamedPool, Swap, host_blocks

CPU = torch.device("cpu")
KIND = StateKind("delta", 2, 4, 3, 1, 4)
STATES = StateGroup(3, KIND, "bfloat16", 6, 2, 3 * 2 * KIND.numbers(2), num_host_blocks=4)
KV = kv_group((0,), 2, 4, "float32", 5, 1, num_host_blocks=3)


def filled_store():
    """A store with numbers in all blocks, and a copy of its state blocks."""
    store = DeviceStore(reference, CacheConfig(4, (KV, KV), states=STATES), CPU)
    for storage in (*store.storages, store.states):
        storage.data.normal_()
    return store, store.states.by_block.clone()


def test_a_store_has_state_blocks_of_their_type_if_the_cache_has_some():
    store, _ = filled_store()
    assert store.states.group is STATES
    assert store.states.by_block.nbytes == 6 * STATES.bytes_per_block
    assert DeviceStore(reference, CacheConfig(4, (KV,)), CPU).states is None


def test_moves_of_the_group_behind_the_last_one_copy_whole_state_blocks_at_once():
    store, before = filled_store()
    kv = [storage.data.clone() for storage in store.storages]
    store.execute(0, [Move(1, 2, "device", "device", [(0, 1), (1, 2), (5, 0)], 1)])
    assert torch.equal(store.states.by_block, before[[5, 0, 1, 3, 4, 5]])
    assert all(torch.equal(storage.data, was) for storage, was in zip(store.storages, kv, strict=True))


def test_state_blocks_come_back_from_the_host_as_they_were():
    store, before = filled_store()
    store.execute(0, [Move(1, 2, "device", "host", [(4, 3), (0, 0)], 1), Move(2, 1, "device", "host", [(4, 2)], 4)])
    store.states.data.zero_()
    store.execute(1, [Move(3, 2, "host", "device", [(3, 1), (0, 5)], 1)])
    assert torch.equal(store.states.by_block[[1, 5]], before[[4, 0]])
    assert not store.states.by_block[[0, 2, 3, 4]].any()
    assert store.end_swaps(1, wait=True).move_ids == [1, 2, 3]


def test_without_states_there_is_no_further_group():
    store = DeviceStore(reference, CacheConfig(4, (KV,)), CPU)
    for target in ("device", "host"):
        with pytest.raises(IndexError):
            store.execute(0, [Move(1, 1, "device", target, [(0, 1)], 4)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_copies_beside_a_device_stage_one_state_block_at_a_time_if_it_is_large(monkeypatch):
    class Stream:
        """A fake device stream, whose work runs at once."""

        def wait_stream(self, other):
            """Nothing runs beside it."""

        wait_event = wait_stream

    store, before = filled_store()
    staged = []
    monkeypatch.setattr(host, "STAGING_BYTES", STATES.bytes_per_block - 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(host, "_now", lambda: None)
    monkeypatch.setattr(host, "_swap", lambda began, ended: Swap(lambda: True, lambda: 0.5))
    monkeypatch.setattr(
        host, "to_device", lambda array, device: (staged.append(len(array)), torch.from_numpy(array))[1]
    )
    monkeypatch.setattr(host, "host_blocks", lambda *args, pinned: host_blocks(*args, pinned=False))
    pool = StreamedPool(store.states, 4, Stream())
    pool.swap_out([(5, 0), (0, 3)])
    store.states.data.zero_()
    pool.swap_in([(3, 2), (0, 1)])
    assert staged == [1] * 4
    assert torch.equal(store.states.by_block[[1, 2]], before[[5, 0]])

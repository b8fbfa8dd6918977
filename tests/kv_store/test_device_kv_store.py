"""Device KV storage: the canonical layout, copies, and memory that is committed only when it is used."""

from pathlib import Path

import numpy as np
import pytest
import torch
from kv_groups import kv_group

from quire.config import CacheConfig
from quire.core.step import Move
from quire.kernels import reference
from quire.kernels.contract import Batch
from quire.kernels.reference.paged import write_kv
from quire.kv_store.device import DeviceStore

CPU = torch.device("cpu")
GROUP = kv_group((0, 1), 2, 4, "float32", 6, 1)


def filled(block_size=4):
    storage = reference.allocate(GROUP, block_size, CPU)
    storage.data.copy_(torch.randn(storage.data.shape))
    return storage


def test_blocks_start_as_zeros_of_the_asked_type():
    for name, dtype in (("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        storage = reference.allocate(kv_group((0,), 2, 4, name, 3, 1), 4, CPU)
        canonical = reference.pack(storage, torch.arange(3))
        assert canonical.dtype == dtype
        assert canonical.shape == (1, 2, 3, 4, 2, 4)
        assert not canonical.any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs to see its own memory")
def test_memory_is_taken_only_when_written():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    storage = reference.allocate(kv_group((0, 1), 8, 128, "float32", 8192, 1), 8, CPU)
    assert storage.data.nbytes == 2**30
    assert resident() - before < 2**26


def test_canonical_layout_is_layer_kv_block_place_head_dim():
    storage = reference.allocate(GROUP, 4, CPU)
    plan = reference.plan(Batch(np.array([0]), np.array([6]), np.array([[5, 2]])), storage)
    k, v = torch.randn(2, 6, 2, 4)
    write_kv(storage, 1, k, v, plan)
    canonical = reference.pack(storage, torch.tensor([2, 5]))
    assert torch.equal(canonical[1, 0, 1], k[:4])
    assert torch.equal(canonical[1, 1, 0, :2], v[4:])
    assert not canonical[0].any()
    assert not canonical[1, :, 0, 2:].any()


def test_unpack_is_the_inverse_of_pack():
    source, target = filled(), filled()
    canonical = reference.pack(source, torch.tensor([4, 0]))
    untouched = reference.pack(target, torch.tensor([0, 1, 2, 4]))
    reference.unpack(target, torch.tensor([3, 5]), canonical)
    assert torch.equal(reference.pack(target, torch.tensor([3, 5])), canonical)
    assert torch.equal(reference.pack(target, torch.tensor([0, 1, 2, 4])), untouched)


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_copies_happen_at_once_and_clear_what_was_not_copied(num_tokens):
    storage = filled()
    storage.data[:, :, :, num_tokens:] = torch.nan
    old = reference.pack(storage, torch.arange(6))
    reference.copy_blocks(storage, torch.tensor([(0, 1), (1, 2), (2, 0)]), num_tokens)
    new = reference.pack(storage, torch.arange(6))
    for source, target in ((0, 1), (1, 2), (2, 0)):
        assert torch.equal(new[:, :, target, :num_tokens], old[:, :, source, :num_tokens])
        assert not new[:, :, target, num_tokens:].any()
    assert torch.equal(new[:, :, 3:, :num_tokens], old[:, :, 3:, :num_tokens])


def store():
    return DeviceStore(reference, CacheConfig(4, (GROUP, GROUP)), CPU)


def test_the_store_does_moves_in_turn_in_the_group_they_name():
    device = store()
    for storage in device.storages:
        storage.data.copy_(torch.randn(storage.data.shape))
    first, second = (reference.pack(storage, torch.arange(6)) for storage in device.storages)
    device.execute(0, [Move(1, 1, "device", "device", [(0, 1)], 4), Move(2, 1, "device", "device", [(1, 2)], 4)])
    assert torch.equal(reference.pack(device.storages[0], torch.arange(6)), first)
    assert torch.equal(reference.pack(device.storages[1], torch.tensor([1, 2])), second[:, :, [0, 0]])


def test_the_store_refuses_other_tiers_before_it_moves_anything():
    device = store()
    device.storages[0].data.normal_()
    before = device.storages[0].data.clone()
    with pytest.raises(ValueError, match="within the device"):
        device.execute(0, [Move(1, 0, "device", "device", [(0, 1)], 4), Move(2, 0, "device", "disk", [(1, 2)], 4)])
    assert torch.equal(device.storages[0].data, before)

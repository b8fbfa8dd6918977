"""The loader of adapters: results of its thread, errors with the adapter's name, and memory that is released."""

import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import pytest
from peft_adapters import change_config, change_tensors, save_matrices

from quire.core.adapter import AdapterLoad
from quire.errors import AdapterError
from quire.kernels import reference
from quire.lora.loader import AdapterLoader
from quire.lora.peft import read_adapter
from quire.lora.tables import AdapterTables
from quire.models.description import describe
from quire.models.loading import load

SHAPES = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.1.mlp.up_proj": (96, 64)}
PARTS = ("q_proj", "k_proj", "v_proj")  # of one product of the decoder
FUSED = {f"model.layers.0.self_attn.{part}": (64 if part == "q_proj" else 32, 64) for part in PARTS}
SECONDS = 60


class Tables(AdapterTables):
    """Tables that remember which packed adapters are alive. `gate`: packing waits for it."""

    def __init__(self, model):
        super().__init__(model, reference, 3)
        self.made, self.gate, self.failure = [], threading.Event(), None
        self.gate.set()

    def pack(self, matrices):
        assert self.gate.wait(SECONDS)
        if self.failure is not None:
            raise self.failure
        packed = super().pack(matrices)
        self.made += [weakref.ref(one.matrices[0].a) for one in packed.values()]
        return packed

    @property
    def num_alive(self):
        """Weights whose adapter is in memory."""
        return sum(ref() is not None for ref in self.made)


class Loading:
    def __init__(self, folder, where):
        self.where = where
        self.description = describe(folder)
        self.tables = Tables(load(self.description, dtype="float32"))
        self.loader = AdapterLoader(self.description, "float32", self.tables)

    def save(self, name, shapes=None, **config):
        save_matrices(self.where / name, SHAPES if shapes is None else shapes, seed=len(name), **config)
        return self.read(name)

    def read(self, name):
        found: SimpleQueue[Future] = SimpleQueue()
        self.loader.read(name, str(self.where / name), found.put)
        return found.get(timeout=SECONDS).result()

    def load(self, adapter, *evicted):
        """Load an adapter, and return its error."""
        self.loader.start(AdapterLoad(adapter, tuple(one.digest for one in evicted)))
        self.loader.wait(SECONDS)
        ((digest, error),) = self.loader.finished()
        assert digest == adapter.digest
        assert self.loader.finished() == [], "each result is reported once"
        return error


@pytest.fixture
def loading(saved, tmp_path):
    one = Loading(saved("llama-3")[0], tmp_path)
    yield one
    one.tables.gate.set()
    one.loader.close()


def test_an_adapter_is_read_and_errors_come_back(loading):
    adapter = loading.save("poet")
    assert (adapter.name, adapter.rank, adapter.path) == ("poet", 4, str(loading.where / "poet"))
    change_config(loading.where / "poet", use_dora=True)
    with pytest.raises(AdapterError, match="DoRA"):
        loading.read("poet")


def test_a_loaded_adapter_can_be_put_into_slots_once_it_was_reported(loading):
    adapter, loaded = loading.save("poet"), loading.loader.loaded
    loading.loader.start(AdapterLoad(adapter))
    loading.loader.wait(SECONDS)
    with pytest.raises(ValueError, match="is not in memory"):
        loaded.put(1, adapter.digest)
    assert loading.loader.finished() == [(adapter.digest, "")]
    loaded.put(1, adapter.digest)
    for slot in (0, 4, -1):
        with pytest.raises(ValueError, match=f"slot {slot} of an adapter is not from 1 to 3"):
            loaded.put(slot, adapter.digest)


def test_waiting_ends_at_once_without_loads_and_after_its_time_with_one(loading):
    loading.loader.wait(SECONDS * 60)
    adapter = loading.save("poet")
    loading.tables.gate.clear()
    loading.loader.start(AdapterLoad(adapter))
    loading.loader.wait(0.01)
    assert loading.loader.finished() == []
    loading.tables.gate.set()
    loading.loader.wait(SECONDS)
    assert loading.loader.finished() == [(adapter.digest, "")]


def test_errors_of_loads_name_the_adapter_and_leave_nothing_in_memory(loading, caplog):
    first, second = loading.save("poet"), loading.save("critic")
    change_tensors(loading.where / "poet", lambda tensors: {name: tensor + 1 for name, tensor in tensors.items()})
    error = loading.load(first)
    assert error.startswith("the adapter 'poet' could not be loaded: ") and "changed on disk; load it again" in error
    assert not caplog.records, "the reason is in the error"
    loading.tables.failure = MemoryError("of the device")
    assert loading.load(second) == "the adapter 'critic' could not be loaded: MemoryError: of the device"
    assert "'critic' could not be loaded" in caplog.text
    with pytest.raises(ValueError, match="is not in memory"):
        loading.loader.loaded.put(1, second.digest)
    loading.tables.failure = None
    assert loading.load(second) == ""
    loading.loader.loaded.put(1, second.digest)


def test_an_error_of_a_load_does_not_tell_where_the_files_are(loading):
    adapter = loading.save("gone")
    (loading.where / "gone" / "adapter_model.safetensors").unlink()
    loading.loader.start(AdapterLoad(adapter))
    loading.loader.wait(SECONDS)
    ((_, error),) = loading.loader.finished()
    assert "gone" in error
    assert str(loading.where) not in error


def test_an_adapter_that_needs_more_than_all_memory_is_refused_before_its_bytes_are_read(loading, monkeypatch):
    adapter = loading.save("large")
    monkeypatch.setattr("quire.lora.peft.begin_digest", lambda *_: pytest.fail("it was read"))
    with pytest.raises(AdapterError, match=r"raise --lora-memory"):
        read_adapter(Path(adapter.path), "large", loading.description, "float32", memory=adapter.num_bytes - 1)


def test_evicted_adapters_leave_memory_before_the_next_is_read(loading):
    first, second, third = (loading.save(name) for name in ("poet", "critic", "a third one"))
    loaded, tables = loading.loader.loaded, loading.tables
    assert loading.load(first) == loading.load(second) == ""
    loaded.put(1, first.digest)
    loaded.put(2, first.digest)
    assert tables.num_alive == 2 * len(SHAPES)
    tables.gate.clear()
    loading.loader.start(AdapterLoad(third, (first.digest, second.digest)))
    assert tables.num_alive == 0, "one was in two slots, the other in none"
    tables.gate.set()
    loading.loader.wait(SECONDS)
    assert loading.loader.finished() == [(third.digest, "")]
    assert tables.num_alive == len(SHAPES)
    assert loading.load(first, third) == "", "what was evicted can come again"
    loaded.put(1, first.digest)
    assert tables.num_alive == len(SHAPES)
    loaded.drop(first.digest)
    loaded.drop(first.digest)
    assert tables.num_alive == 0


def test_a_slot_that_gets_another_adapter_keeps_nothing_of_the_one_before(loading):
    first, second = loading.save("poet"), loading.save("critic", FUSED)
    loaded = loading.loader.loaded
    assert loading.load(first) == loading.load(second) == ""
    loaded.put(1, first.digest)
    loaded.put(1, second.digest)
    loaded.drop(first.digest)
    assert loading.tables.num_alive == 1
    assert loaded.width == 16, "12 numbers of the second one's only product"


def test_the_width_is_a_power_of_two_for_the_widest_adapter_in_a_slot(loading):
    narrow, wide = loading.save("poet"), loading.save("critic", FUSED)
    loaded = loading.loader.loaded
    assert loading.load(narrow) == loading.load(wide) == ""
    assert loaded.width == 0
    loaded.put(2, narrow.digest)
    assert loaded.width == 4
    loaded.put(3, wide.digest)
    assert loaded.width == 16, "three matrices of 4 rows are multiplied with the same input"
    loaded.drop(wide.digest)
    assert loaded.width == 4


def test_closing_ends_the_thread_after_its_work_without_the_loads_that_wait(loading):
    first, second = loading.save("poet"), loading.save("critic")
    (thread,) = [one for one in threading.enumerate() if one.name.startswith("quire-adapters")]
    loading.tables.gate.clear()
    loading.loader.start(AdapterLoad(first))
    loading.loader.start(AdapterLoad(second))
    loading.loader.close()
    loading.tables.gate.set()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert len(loading.tables.made) <= len(SHAPES), "the second was not loaded"

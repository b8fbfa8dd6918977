"""Imports with torch: imported objects are excluded from garbage collection, and torch works."""

import gc
import subprocess
import sys

import pytest

from quire.preload import gc_disabled, import_with_torch

SCRIPT = """
import gc, sys
import quire
quire.SamplingParams
assert "torch" not in sys.modules
found = []
class Watch:
    def find_spec(self, name, *rest):
        found.append(name)
sys.meta_path.insert(0, Watch())
from quire import LLM
assert found.index("quire.scheduler.journal") < found.index("torch._C") < found.index("quire.kernels.contract")
torch = sys.modules["torch"]
assert torch.ones(3, 3).matmul(torch.ones(3)).tolist() == [3, 3, 3]
assert gc.isenabled()
assert len(gc.get_objects(generation=2)) > 100_000 > 100 * len(gc.get_objects(generation=0))
"""


def test_torch_works_and_its_objects_are_old_once_an_llm_can_be_made():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=300)


def test_a_module_is_imported_where_torch_is_there_already():
    assert import_with_torch("torch") is sys.modules["torch"]
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        import_with_torch("quire.nowhere")


@pytest.mark.parametrize("enabled", [True, False])
def test_objects_made_under_gc_disabled_are_in_the_oldest_generation_and_collectable(enabled):
    gc.unfreeze()  # another test of this process may have run a benchmark, which freezes what is loaded
    gc.enable() if enabled else gc.disable()
    try:
        with gc_disabled():
            assert not gc.isenabled()
            made = [[] for _ in range(5000)]
            made.append(made)
        assert gc.isenabled() == enabled
        assert any(item is made for item in gc.get_objects(generation=2))
        del made
        assert gc.collect() >= 1
    finally:
        gc.enable()


def test_gc_disabled_keeps_frozen_objects_frozen():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with gc_disabled():
            pass
        assert abs(gc.get_freeze_count() - count) < 1000  # other objects come and go
    finally:
        gc.unfreeze()

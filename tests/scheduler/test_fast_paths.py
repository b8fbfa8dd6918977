"""The fast paths of decoding give the Steps and Outputs of the slow paths."""

import logging

import pytest

from quire.cache.kv_cache import KVCache
from quire.cache.prefix.radix_index import RadixIndex
from quire.scheduler.sequence import Sequence
from tools.corpus.schedules import Schedule


def refuse(*_):
    return False


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_schedules_are_the_same_without_fast_paths(monkeypatch, seed):
    logging.disable(logging.CRITICAL)  # failing steps are part of the schedules
    try:
        fast, paths = Schedule(seed).run(), []
        for owner, name in ((KVCache, "append_slot"), (KVCache, "_append_blocks"), (RadixIndex, "extend")):
            monkeypatch.setattr(owner, name, lambda *_, name=name: paths.append(name) or False)
        monkeypatch.setattr(Sequence, "is_plain", property(refuse, lambda *_: None))
        slow = Schedule(seed).run()
    finally:
        logging.disable(logging.NOTSET)
    assert fast == slow
    assert "append_slot" in paths

"""A Step out of bounds is refused before kernels, which check nothing, get its ids."""

import msgspec
import pytest

from quire.config import CacheConfig, KVGroup
from quire.core.step import ChunkOutput, Chunks, NewRows, Step, TableUpdates
from quire.runner.rows import Rows

CACHE = CacheConfig(4, (KVGroup((0,), "full", 1, 8, "float32", 8, 1),))
GOOD = {
    "opens": NewRows.of(rows=[1], seq_ids=[5]),
    "tokens": TableUpdates.of([(1, 0, [9, 0, 3])]),
    "blocks": [TableUpdates.of([(1, 0, [-1, 7])])],  # -1: absent
    "chunks": Chunks.of([(1, 5, 0, 3, 0, 1, ChunkOutput.SAMPLE)]),
}
BAD = [
    ("rows", {"opens": NewRows.of(rows=[2], seq_ids=[5])}),
    ("rows", {"chunks": Chunks.of([(-1, 5, 0, 3, 0, 1, ChunkOutput.SAMPLE)])}),
    ("positions", {"chunks": Chunks.of([(1, 5, 0, 18, 0, 1, ChunkOutput.SAMPLE)])}),
    ("positions", {"chunks": Chunks.of([(1, 5, -1, 3, 0, 1, ChunkOutput.SAMPLE)])}),
    ("tokens", {"tokens": TableUpdates.of([(1, 0, [10])])}),
    ("tokens", {"tokens": TableUpdates.of([(1, 0, [-1])])}),
    ("columns", {"tokens": TableUpdates.of([(1, 16, [1, 2])])}),
    ("blocks", {"blocks": [TableUpdates.of([(1, 0, [8])])]}),
    ("blocks", {"blocks": [TableUpdates.of([(1, 0, [-2])])]}),
    ("columns", {"blocks": [TableUpdates.of([(1, 3, [1, 2])])]}),
    ("rows", {"blocks": [TableUpdates.of([(-1, 0, [1])])]}),
]


@pytest.mark.parametrize(("what", "change"), BAD)
def test_a_step_out_of_bounds_is_refused(what, change):
    rows = Rows(CACHE, max_num_seqs=2, max_model_len=16, vocab_size=10)
    good = Step(id=1, reset=False, moves=[], **GOOD)
    rows.apply(good)
    with pytest.raises(ValueError, match=f"some of the step's {what} are not from"):
        rows.apply(msgspec.structs.replace(good, **change))

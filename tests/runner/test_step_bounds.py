"""A Step out of bounds is refused before kernels, which check nothing, get its ids. Spans are written in order."""

import msgspec
import numpy as np
import pytest
from kv_groups import kv_group

from quire.config import CacheConfig
from quire.core.step import ChunkOutput, Chunks, NewRows, Step, TableUpdates
from quire.runner.rows import Rows

CACHE = CacheConfig(4, (kv_group((0,), 1, 8, "float32", 8, 1),))
GOOD = {
    "opens": NewRows.of(rows=[1], seq_ids=[5], adapters=[3]),
    "tokens": TableUpdates.of([(1, 0, [9, 0, 3])]),
    "blocks": [TableUpdates.of([(1, 0, [-1, 7])])],  # -1: absent
    "chunks": Chunks.of([(1, 5, 0, 3, 0, 1, ChunkOutput.SAMPLE)]),
}
BAD = [
    ("rows", {"opens": NewRows.of(rows=[2], seq_ids=[5])}),
    ("slots", {"opens": NewRows.of(rows=[1], seq_ids=[5], adapters=[4])}),
    ("slots", {"opens": NewRows.of(rows=[1], seq_ids=[5], adapters=[-1])}),
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
    rows = Rows(CACHE, max_num_seqs=2, max_model_len=16, vocab_size=10, num_slots=3)
    good = Step(id=1, reset=False, moves=[], **GOOD)
    rows.apply(good)
    with pytest.raises(ValueError, match=f"some of the step's {what} are not from"):
        rows.apply(msgspec.structs.replace(good, **change))


def test_a_step_whose_spans_lack_values_is_refused():
    rows = Rows(CACHE, max_num_seqs=2, max_model_len=16, vocab_size=10, num_slots=3)
    spans = msgspec.structs.replace(GOOD["tokens"], values=GOOD["tokens"].values[:2])
    with pytest.raises(ValueError, match="the step's spans have 3 values, not 2"):
        rows.apply(Step(id=1, reset=False, moves=[], **GOOD | {"tokens": spans}))


@pytest.mark.parametrize("num_spans", [0, 1, 8, 9, 30])
def test_spans_are_written_in_order(num_spans):
    random = np.random.default_rng(num_spans)
    found, expected = np.zeros((2, 4, 20), np.int32)
    spans = []
    for _ in range(num_spans):
        row, start, length = (int(random.integers(stop)) for stop in (4, 16, 5))
        spans.append((row, start, random.integers(1, 99, length).tolist()))
        expected[row, start : start + length] = spans[-1][2]
    TableUpdates.of(spans).apply(found)
    assert (found == expected).all()

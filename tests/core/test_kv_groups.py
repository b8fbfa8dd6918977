"""Kinds of KV: their answers are those of a loop over positions, for kinds of quire and for one of this file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core import codec
from quire.core.kv_groups import FullKV, KVGroup, KVKind, WindowKV, kv_kind, num_attended, num_read
from quire.errors import ConfigError

WINDOWS = st.sampled_from([0, 1, 2, 5, 16, 33])


class SharedKV(KVKind, frozen=True, tag="shared"):
    """One plane: values are the first 5 numbers of keys."""

    name = "shared"

    @property
    def planes(self):
        return (self.head_dim,)

    @property
    def value_dim(self):
        return 5


def attended(position, window):
    return [i for i in range(position + 1) if not window or i > position - window]


@given(window=WINDOWS, position=st.integers(0, 70))
def test_a_query_attends_to_the_last_positions_of_its_window(window, position):
    kind = kv_kind(2, 8, window)
    assert kind.first_attended(position) == attended(position, window)[0]
    assert kind.attended(position + 1) == len(attended(position, window))
    assert kind.drops_blocks == any(kind.first_attended(i) for i in range(1000))


@given(window=WINDOWS, block_size=st.sampled_from([1, 4, 16]), length=st.integers(1, 80), step=st.integers(1, 20))
def test_no_sequence_holds_more_blocks_than_a_kind_says(window, block_size, length, step):
    kind, most = kv_kind(1, 8, window), 0
    for start in range(0, length, step):
        needed = {i // block_size for i in range(attended(start, window)[0], min(start + step, length))}
        most = max(most, len(needed))
    assert most <= kind.max_blocks(length, step, block_size) <= -(-length // block_size)
    assert kind.blocks_for(length, block_size) == -(-length // block_size)
    assert kind.blocks_for(length, block_size, 99) == -(-(length if window else max(length, 99)) // block_size)


@given(window=WINDOWS, start=st.integers(0, 60), count=st.integers(1, 30))
def test_pairs_and_reads_of_a_chunk_are_those_of_its_positions(window, start, count):
    stop = start + count
    seen = [attended(position, window) for position in range(start, stop)]
    pairs = num_attended(np.array([float(stop)]), window) - num_attended(np.array([float(start)]), window)
    assert pairs == sum(map(len, seen))
    (read,) = num_read(np.array([start]), np.array([stop]), window)
    assert read >= len(set().union(*seen))
    assert read == len(set().union(*seen)) or (window and stop < window + count)


def test_sizes_of_planes():
    assert (FullKV(2, 8).planes, FullKV(2, 8).numbers_per_token) == ((8, 8), 32)
    assert FullKV(2, 8).bytes_per_token(lambda numbers: numbers + 4) == 2 * 2 * 12
    assert (SharedKV(1, 12).planes, SharedKV(1, 12).numbers_per_token) == ((12,), 12)
    assert SharedKV(1, 12).bytes_per_token(lambda numbers: 2 * numbers) == 24


def test_kinds_are_equal_by_kind_and_sizes_and_have_names():
    assert kv_kind(2, 8) == FullKV(2, 8) and kv_kind(2, 8, 5) == WindowKV(2, 8, 5)
    assert len({FullKV(2, 8), WindowKV(2, 8, 5), WindowKV(2, 8, 6), FullKV(2, 9), SharedKV(2, 8)}) == 5
    assert [str(kind) for kind in (FullKV(2, 8), WindowKV(2, 8, 5), SharedKV(2, 8))] == ["full", "window 5", "shared"]
    with pytest.raises(ConfigError, match="at least one position, not 0"):
        WindowKV(2, 8, 0)


def test_groups_are_decoded_with_their_kinds():
    for kind in (FullKV(2, 8), WindowKV(2, 8, 5)):
        group = KVGroup((0, 2), kind, "int8", 9, 4096, 3)
        assert codec.decode(codec.encode(group), KVGroup) == group

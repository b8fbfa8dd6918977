"""The modelled runner with recurrent states: what chunks, snapshots, copies and swaps of state blocks take."""

import pytest
from hybrid_shape import BLOCK_BYTES, state_group
from kv_groups import kv_group
from msgspec import structs

from quire.config import CacheConfig
from quire.core.step import ChunkOutput, Chunks, Move, NewRows, SamplingMasks, StateChunks, Step, TableUpdates
from quire.planner.modelled_runner import ModelledRunner, VirtualClock
from tests.planner.test_simulation import PROFILE

CACHE = CacheConfig(16, (kv_group((0,), 1, 8, "float32", 64, 512, num_host_blocks=8),), states=state_group(8, 4))
PER_CHUNK = 2e-3
TIMED = structs.replace(PROFILE, per_chunk=PER_CHUNK, seconds_per_byte=1e-9)


def result_of(*, rows=2, snapshots=(), moves=()):
    """The result of a step that decodes `rows` sequences at position 10."""
    runner = ModelledRunner(TIMED, CACHE, VirtualClock(), max_num_seqs=8, vocab_size=100)
    step = Step(
        id=1,
        reset=False,
        opens=NewRows.of(rows=[]),
        tokens=TableUpdates.of([]),
        blocks=[TableUpdates.of([])],
        moves=list(moves),
        chunks=Chunks.of([(row, row, 10, 11, 0, 1, ChunkOutput.SAMPLE) for row in range(rows)]),
        states=StateChunks.of([(row, 10, 11) for row in range(rows)], snapshots),
    )
    runner.launch(step)
    runner.sample(1, SamplingMasks.empty())
    runner.collect()
    empty = structs.replace(step, id=2, moves=[], chunks=Chunks.of([]), states=StateChunks.of([], []))
    runner.launch(empty)  # a step without chunks waits for the swaps
    return runner.busy_seconds, runner.collect()


def test_a_snapshot_and_a_copy_take_as_long_as_the_state_of_a_chunk():
    usual, _ = result_of()
    assert usual == pytest.approx(TIMED.decode_seconds(2, 10))
    assert result_of(snapshots=[(0, 11, 5), (1, 11, 6)])[0] - usual == pytest.approx(2 * PER_CHUNK)
    fork = Move(1, 1, "device", "device", [(0, 5), (0, 6), (0, 7)], 1)
    assert result_of(moves=[fork])[0] - usual == pytest.approx(3 * PER_CHUNK)


def test_swaps_of_states_take_their_bytes_beside_the_steps():
    busy, result = result_of(moves=[Move(1, 1, "device", "host", [(0, 3)], 1)])
    assert busy == result_of()[0]
    assert result.done_moves == [1]
    assert result.swap_seconds == (pytest.approx(BLOCK_BYTES * 1e-9), 0.0)

"""Device-resident rows equal the host's rows after any steps; both are checked against plain lists."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_groups import kv_group
from triton_device import DEVICE

from quire.config import CacheConfig
from quire.core.step import Chunks, NewRows, Step, TableUpdates
from quire.runner.device_inputs import ResidentInputs
from quire.runner.inputs import HostInputs
from quire.runner.rows import Rows

CPU = torch.device("cpu")
BLOCK, LENGTH, NUM_ROWS, VOCAB = 4, 30, 5, 97
GROUPS = 2


def cache():
    groups = [kv_group((i,), 1, 8, "float32", 100, 1) for i in range(GROUPS)]
    return CacheConfig(BLOCK, tuple(groups))


class Both:
    """Host and device rows with the same steps, and lists of the expected content."""

    def __init__(self):
        self.rows = Rows(cache(), NUM_ROWS, LENGTH, VOCAB)
        self.late_rows = Rows(cache(), NUM_ROWS, LENGTH, VOCAB)  # beside resident rows: tokens arrive later
        self.ways = [HostInputs(self.rows, CPU), ResidentInputs(cache(), NUM_ROWS, LENGTH, DEVICE)]
        self.fixed = {(size, i): way.captured_inputs(size) for size in (2, 8) for i, way in enumerate(self.ways)}
        self.tokens = [[] for _ in range(NUM_ROWS)]
        self.tables = [[[] for _ in range(NUM_ROWS)] for _ in range(GROUPS)]
        self.arriving = []

    def step(self, *, opened=(), tokens=(), blocks=((), ()), reset=False):
        """opened: rows. tokens and blocks: (row, first, values) spans, written one after another."""
        if reset:
            self.tokens, self.tables = [[] for _ in self.tokens], [[[] for _ in table] for table in self.tables]
            self.arriving.clear()
        for row in opened:
            self.tokens[row] = []
            for table in self.tables:
                table[row] = []
        for spans, lists in zip((tokens, *blocks), (self.tokens, *self.tables), strict=True):
            for row, first, values in spans:
                lists[row][first:] = values
        opens = NewRows.of(rows=list(opened), seq_ids=list(opened))
        written = [TableUpdates.of(spans) for spans in blocks]
        step = Step(0, reset, opens, TableUpdates.of(list(tokens)), written, [], Chunks.of([]))
        self.rows.apply(step)
        self.late_rows.apply(step)
        for way in self.ways:
            way.apply(step)

    def sample(self, row, token):
        """Sample a token, which `late_rows` get only when it arrives."""
        rows, positions = np.array([row], np.int32), np.array([len(self.tokens[row])], np.int32)
        for way in self.ways:
            way.put_sampled(rows, positions, torch.tensor([token], device=CPU if way is self.ways[0] else DEVICE))
        self.late_rows.mark_pending(rows, positions)
        self.tokens[row].append(max(token, 0))
        self.arriving.append((rows, positions, np.array([token], np.int32)))

    def arrive(self):
        for sampled in self.arriving:
            self.late_rows.write_pending(*sampled)
        self.arriving.clear()

    def check(self, spans):
        """spans: (row, start, stop) of chunks."""
        chunks = Chunks.of([(row, row, start, stop, 0, 1, 1) for row, start, stop in spans])
        expected = [token for row, start, stop in spans for token in self.tokens[row][start:stop]]
        positions = [position for _, start, stop in spans for position in range(start, stop)]
        if not self.arriving:
            assert self.late_rows.inputs(chunks)[0].tolist() == expected
        for i, way in enumerate(self.ways):
            fed = way.forward_inputs(chunks)
            assert (fed.token_ids.tolist(), fed.positions.tolist()) == (expected, positions)
            assert fed.token_ids.dtype == fed.positions.dtype == torch.int64
            self.check_batches(fed.batches, spans)
            if way is self.ways[1] and len(expected) <= 8:
                self.check_divided(self.fixed[2 if len(expected) <= 2 else 8, i], chunks, spans, expected)
            if all(stop == start + 1 for _, start, stop in spans):
                self.check_fixed(self.fixed[2 if len(spans) <= 2 else 8, i], chunks, spans, expected)

    def check_fixed(self, fixed, chunks, spans, expected):
        batches, more = fixed.refill(chunks), len(fixed.positions) - len(spans)
        assert fixed.token_ids()[: len(spans)].tolist() == expected
        assert fixed.positions.tolist() == [start for _, start, _ in spans] + [0] * more
        self.check_batches(batches, spans, more)

    def check_divided(self, fixed, chunks, spans, expected):
        """Each token is a chunk. `ends`: where the tokens of its row end."""
        tokens = [(row, at, at + 1) for row, start, stop in spans for at in range(start, stop)]
        batches, more = fixed.refill(chunks), len(fixed.positions) - len(tokens)
        assert fixed.token_ids()[: len(tokens)].tolist() == expected
        self.check_batches(batches, tokens, more)
        ends = [stop for _, start, stop in spans for _ in range(start, stop)]
        assert all(batch.ends.tolist() == ends + [1] * more for batch in batches)

    def check_batches(self, batches, spans, more=0):
        for batch, lists in zip(batches, self.tables, strict=True):
            assert batch.starts.tolist() == [start for _, start, _ in spans] + [0] * more
            assert batch.stops.tolist() == [stop for _, _, stop in spans] + [1] * more
            tables = batch.tables
            if batch.resident is not None:
                assert tables.shape == (len(batch.starts), 0)
                tables = batch.resident.tables[batch.resident.rows].cpu().numpy()
            for found, (row, _, stop) in zip(tables, spans, strict=False):
                used = -(-stop // BLOCK)
                assert found[:used].tolist() == lists[row][:used]
            assert (tables[len(spans) :] == -1).all()


def fresh_blocks(random, num_tokens, first=0):
    return random.integers(-1, 100, -(-num_tokens // BLOCK) - first).tolist()


def act(both, random, *, force):
    """One random step: rows open, continue, are overwritten, or all are reset."""
    reset = random.random() < 0.1
    known = [row for row in range(NUM_ROWS) if both.tokens[row] and not reset]
    opened = random.permutation([row for row in range(NUM_ROWS) if row not in known])[: random.integers(0, 3)].tolist()
    reopened = [row for row in known if random.random() < 0.1]
    tokens, blocks = [], [[] for _ in range(GROUPS)]
    for row in known:
        length = len(both.tokens[row])
        for group, spans in enumerate(blocks):  # tables grow, and entries from a position on may be replaced
            first = min(len(both.tables[group][row]), int(random.integers(0, 8)))
            if new := fresh_blocks(random, length + 1, first):
                spans.append((row, first, new))
        if force and random.random() < 0.3 and row not in reopened:
            first = int(random.integers(max(length - 2, 0), length + 1))
            new = random.integers(0, VOCAB, int(random.integers(length - first, 4))).tolist()
            tokens.append((row, first, new[: max(0, LENGTH - 1 - first)]))  # a full row takes none
    for row in [*opened, *reopened]:  # a row that got blocks in the same step may be opened again
        length = int(random.integers(1, LENGTH - 4))
        tokens.append((row, 0, random.integers(0, VOCAB, length).tolist()))
        for spans in blocks:
            spans.append((row, 0, fresh_blocks(random, length + 1)))
    both.step(opened=[*opened, *reopened], tokens=tokens, blocks=blocks, reset=reset)


def ready(both):
    """Rows whose block tables cover all of their tokens."""
    return [
        row
        for row in range(NUM_ROWS)
        if 0 < len(both.tokens[row]) < LENGTH
        and all(len(table[row]) * BLOCK >= len(both.tokens[row]) for table in both.tables)
    ]


def play(seed, num_steps, *, force):
    both, random = Both(), np.random.default_rng(seed)
    for _ in range(num_steps):
        act(both, random, force=force)
        if random.random() < 0.7:
            both.arrive()
        if not (rows := ready(both)):
            continue
        lengths = {row: len(both.tokens[row]) for row in rows}
        both.check([(row, length - 1, length) for row, length in lengths.items()])
        starts = {row: int(random.integers(0, length)) for row, length in lengths.items()}
        both.check([(row, start, int(random.integers(start + 1, lengths[row] + 1))) for row, start in starts.items()])
        both.arrive()  # from the step before the one that samples
        for row in rows:
            if random.random() < 0.6:
                both.sample(row, int(random.integers(-1, VOCAB)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 12))
def test_both_ways_say_what_was_written(seed, num_steps):
    play(seed, num_steps, force=False)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 12))
def test_a_token_that_a_step_brings_replaces_one_that_was_sampled_there(seed, num_steps):
    play(seed, num_steps, force=True)


def test_the_last_of_several_values_counts():
    both = Both()
    both.step(opened=[1], tokens=[(1, 0, [5, 6, 7])], blocks=[[(1, 0, [3])], [(1, 0, [4])]])
    spans = [(1, 0, [8, 9]), (1, 0, [10])]
    both.step(tokens=[(1, 1, [20, 21]), (1, 1, [30])], blocks=[spans, []])
    resident = both.ways[1]
    assert resident.tables[0][1, :2].tolist() == [10, 9]
    assert resident.tokens[1, :3].tolist() == [5, 30, 21]


def test_a_step_without_a_delta_touches_nothing(monkeypatch):
    both = Both()
    both.step(opened=[0], tokens=[(0, 0, [5])], blocks=[[(0, 0, [3])], [(0, 0, [4])]])
    monkeypatch.setattr(
        "quire.runner.device_inputs.to_device", lambda array, device: pytest.fail("something was uploaded")
    )
    both.step()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU is always in step with itself")
def test_device_inputs_never_synchronize_with_the_device():
    inputs, token = ResidentInputs(cache(), NUM_ROWS, LENGTH, DEVICE), torch.tensor([7], device=DEVICE)
    fixed, chunks = inputs.captured_inputs(2), Chunks.of([(1, 1, 2, 3, 0, 1, 1)])
    blocks = [TableUpdates.of([(1, 0, [3])]) for _ in range(GROUPS)]
    opens = NewRows.of(rows=[1], seq_ids=[1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs.apply(Step(0, True, opens, TableUpdates.of([(1, 0, [5, 6, 7])]), blocks, [], chunks))  # noqa: FBT003
        inputs.forward_inputs(chunks)
        inputs.put_sampled(np.array([1], np.int32), np.array([3], np.int32), token)
        fixed.refill(chunks)
        fixed.token_ids()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_views_of_kernels_begin_where_they_load_well():
    for length in range(1, 40, 7):
        inputs = ResidentInputs(cache(), NUM_ROWS, length, DEVICE)
        begins = [table.storage_offset() for table in inputs.tables]
        assert all(begin % 4 == 0 for begin in begins)
        assert begins[0] >= inputs.tokens.numel() and begins[1] >= begins[0] + inputs.tables[0].numel()
        assert len(inputs.words) >= begins[1] + inputs.tables[1].numel()
        positions = inputs.forward_inputs(Chunks.of([(0, 0, 0, min(length, 7), 0, 1, 1)])).positions
        assert positions.storage_offset() % 2 == 0 == inputs.captured_inputs(7).positions.storage_offset() % 2

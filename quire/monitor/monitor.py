"""The monitor: updates of the state of scheduler and cache for each viewer. Reads them, and changes nothing there.

A viewer that does not see all gets its own requests, and of others only the load, every few seconds. All other blocks
look alike, whether a request uses them, the prefix index keeps them, or they are free. Steps without a sequence of its
own are left out, and do not count.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import chain, islice
from types import MappingProxyType
from typing import Literal

import numpy as np
from msgspec import structs

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT
from quire.cache.prefix.radix_node import Node
from quire.cache.states import StateBlocks
from quire.core.kv_groups import KVGroup
from quire.monitor import blocks as block_states
from quire.monitor.tree import TreeView, TreeViews, num_visible, visible_nodes
from quire.monitor.update import (
    BlockRun,
    Others,
    PoolFigures,
    SequenceRow,
    StepRow,
    TreeChanges,
    Update,
    Watcher,
)
from quire.scheduler.request_state import RequestState
from quire.scheduler.request_stats import Totals
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence
from quire.scheduler.step_log import MOST_STEPS, LoggedStep, StepTokens

MOST_SEQUENCES = 512  # listed
LOAD_SECONDS = 5.0

_WAITS: Mapping[str, str] = MappingProxyType(
    {
        "step": "for the next step",
        "tokens": "the token budget of the step is used up",
        "rows": "max_num_seqs sequences run",
        "memory": "KV blocks are short",
        "in_flight": "the first in the queue was preempted, and steps with it are in flight",
        "state": "the first in the queue will start from a recurrent state that this step computes",
        "failure": "a step has failed, and its sequences run one by one",
        "prompt": "another sequence of the request computes the prompt",
        "constraint": "the constraint is being compiled",
        "adapter": "its adapter is not in memory yet",
    }
)


class Load:
    """Numbers of sequences by tenant, counted every LOAD_SECONDS. More often they would tell when requests end."""

    def __init__(self) -> None:
        self._next = 0.0  # when they are counted again, seconds of the engine's clock
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    def of_others(self, scheduler: Scheduler, tenant: str, now: float) -> Others:
        """The numbers of all tenants but one."""
        if now >= self._next:
            self._next = now + LOAD_SECONDS
            sequences = scheduler.state.sequences.values()
            self._running = Counter(seq.request.namespace.tenant for seq in sequences if seq.row >= 0)
            self._waiting = Counter(seq.request.namespace.tenant for seq in sequences if seq.row < 0)
        counts = (some.total() - some[tenant] for some in (self._running, self._waiting))
        return Others(*counts)


class Owners:
    """Small numbers for sequences that own blocks. The number of a sequence that has ended is given again."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by sequence id
        self._free: list[int] = []

    def assign(self, seq_ids: list[int]) -> None:
        """Keep, give and take numbers, so that exactly these sequences have one."""
        alive = set(seq_ids)
        for seq_id in [one for one in self._numbers if one not in alive]:
            heappush(self._free, self._numbers.pop(seq_id))
        for seq_id in seq_ids:
            if seq_id not in self._numbers:
                self._numbers[seq_id] = heappop(self._free) if self._free else len(self._numbers) + 1

    def number(self, seq_id: int) -> int:
        """The number of a sequence, from 1 on; 0 if it has none."""
        return self._numbers.get(seq_id, 0)


class Viewer:
    """What one viewer has seen."""

    def __init__(self, watcher: Watcher, owners: Owners) -> None:
        self.watcher = watcher
        self.num_updates = 0
        self.owners = owners
        self.device: list[np.ndarray] | None = None  # codes of blocks, per group
        self.host: list[np.ndarray] | None = None
        self.tree: TreeView | None = None
        self.tree_version = 0
        self.last_step = -1
        self.own_steps: dict[int, int] = {}  # numbers of the logged steps with its sequences, if it sees no others
        self.unmeasured: set[int] = set()  # steps that it has seen without their measured seconds

    def can_continue(self, watcher: Watcher, num_seen: int, tree: TreeView | None) -> bool:
        """Whether it can go on with changes behind its `num_seen`-th update."""
        if (self.watcher, self.num_updates) != (watcher, num_seen) or tree is not self.tree:
            return False
        return tree is None or tree.knows(self.tree_version)


class TableBlocks:
    """The blocks of one table in one group, as an array. Comparing lists is faster than converting them."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self.present = np.empty(0, np.intp)  # without absent ones

    def update(self, blocks: list[int]) -> None:
        """Bring the array up to date."""
        if blocks != self._blocks:
            self._blocks = list(blocks)
            array = np.array(blocks, np.intp)
            self.present = array[array != ABSENT]


class Monitor:
    """Updates for viewers. Steps are recorded as long as it exists; `close` ends that."""

    def __init__(self, scheduler: Scheduler, load: Load) -> None:
        """load: kept longer than a monitor, so that a viewer cannot have it counted by coming again."""
        self._scheduler = scheduler
        self._load = load
        self._viewers: dict[int, Viewer] = {}
        self._tables: dict[int, list[TableBlocks]] = {}  # by sequence id, per group
        self._trees = TreeViews(scheduler.cache.index)
        scheduler.log_steps(wanted=True)

    def close(self) -> None:
        """End the record of steps, and of changes of the trees."""
        self._scheduler.log_steps(wanted=False)
        self._trees.close()

    @property
    def num_viewers(self) -> int:
        """Viewers that have had an update and have not left."""
        return len(self._viewers)

    def forget(self, viewer: int) -> None:
        """Forget a viewer that has left. Ignores an unknown one."""
        self._viewers.pop(viewer, None)

    def shown_node(self, viewer: int, number: int) -> Node | None:
        """A node that the last update of a viewer shows; None for another id."""
        tree = self._viewers[viewer].tree
        return None if tree is None else tree.node(number)

    def find_node(self, watcher: Watcher, number: int) -> Node | None:
        """A node that updates of such a watcher show; None for another id."""
        return self._trees.shown(watcher, number)

    def update(self, viewer: int, watcher: Watcher, num_seen: int, now: float, unix_time: float) -> Update:
        """The changes since the last update of a viewer, or the whole state, if that was not its `num_seen`-th.

        viewer: a number that the caller chooses. now: seconds of the engine's clock.
        """
        scheduler = self._scheduler
        running, waiting = self._sequences(watcher)
        view = self._tree_view(watcher, running)
        known = self._viewers.get(viewer)
        full = known is None or not num_seen or not known.can_continue(watcher, num_seen, view)
        seen = Viewer(watcher, Owners()) if known is None or known.watcher != watcher else known
        if full:
            seen = Viewer(watcher, seen.owners)
        self._viewers[viewer] = seen
        seen.num_updates = num_seen + 1
        holders = [*running, *(seq for seq in waiting if seq.swapped)]
        seen.owners.assign([seq.id for seq in holders])
        device, host = self._device_codes(seen, running), self._host_codes(seen, holders)
        changes = [_changes(before, codes) for before, codes in ((seen.device, device), (seen.host, host))]
        seen.device, seen.host = device, host
        num_running, num_waiting = len(running), len(waiting) + len(self._unready(watcher))
        others = Others() if watcher.sees_all else self._load.of_others(scheduler, watcher.tenant, now)
        steps = self._steps(seen, full=full)
        return Update(
            full=full,
            at=now,
            now=unix_time,
            step=scheduler.last_step if watcher.sees_all else max(seen.own_steps.values(), default=-1),
            sees="all" if watcher.sees_all else "own",
            pools=self._pool_figures(watcher, device, host),
            blocks=changes[0],
            host_blocks=changes[1],
            requests=self._rows(seen, running, waiting),
            others=others,
            num_running=num_running,
            num_waiting=num_waiting,
            tree=self._tree(seen, view),
            steps=steps,
            totals=self._totals(watcher, chain(running, waiting)),
        )

    # Sequences

    def _sequences(self, watcher: Watcher) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences, and the other unfinished ones, that a watcher may see."""
        state = self._scheduler.state
        running, waiting = state.running_queue.running, (seq for seq in state.sequences.values() if seq.row < 0)
        if watcher.sees_all:
            return list(running), list(waiting)
        mine = watcher.tenant
        of_mine = [[seq for seq in some if seq.request.namespace.tenant == mine] for some in (running, waiting)]
        return of_mine[0], of_mine[1]

    def _unready(self, watcher: Watcher) -> list[RequestState]:
        """Requests without sequences, because they wait for prerequisites."""
        state = self._scheduler.state
        if not state.num_unready:
            return []
        unready = (one for one in state.requests.values() if one.waits_for)
        return [one for one in unready if watcher.sees_all or one.request.namespace.tenant == watcher.tenant]

    def _rows(self, seen: Viewer, running: list[Sequence], waiting: list[Sequence]) -> list[SequenceRow]:
        """The rows of sequences, running ones first, at most MOST_SEQUENCES."""
        rows = [self._row(seen, seq) for seq in islice(chain(running, waiting), MOST_SEQUENCES)]
        rows += [self._row_of_unready(seen, one) for one in self._unready(seen.watcher)]
        return rows[:MOST_SEQUENCES]

    def _row(self, seen: Viewer, seq: Sequence) -> SequenceRow:
        request, table = seq.request, seq.table
        state = self._scheduler.state.requests[request.id]
        status: Literal["running", "waiting", "swapped"] = "running"
        reason = ""
        if seq.row < 0:
            status = "swapped" if seq.swapped else "waiting"
            reason = _reason("prompt" if seq in state.held else self._scheduler.request_stats.wait_cause)
        num_blocks = 0
        if table is not None:
            num_blocks = sum([len(blocks) for blocks in table.blocks]) - sum(table.firsts)
        return SequenceRow(
            request.id,
            seq.id,
            status,
            request.namespace.tenant,
            request.namespace.tenant == seen.watcher.tenant,
            seq.num_prompt_tokens,
            min(seq.num_written, seq.num_prompt_tokens),
            seq.num_cached or 0,
            seq.num_generated,
            request.max_tokens,
            num_blocks,
            state.arrived,
            reason,
            request.scheduling_params.priority,
            request.adapter_name,
            seen.owners.number(seq.id),
        )

    def _row_of_unready(self, seen: Viewer, state: RequestState) -> SequenceRow:
        request, tenant = state.request, state.request.namespace.tenant
        return SequenceRow(
            *(request.id, -1),
            "waiting",
            *(tenant, tenant == seen.watcher.tenant),
            *(len(request.prompt), 0, 0, 0, request.max_tokens, 0),
            state.arrived,
            _reason(min(state.waits_for)),
            request.scheduling_params.priority,
            request.adapter_name,
            0,
        )

    # Blocks

    def _device_codes(self, seen: Viewer, running: list[Sequence]) -> list[np.ndarray]:
        """Codes of the device's blocks, per group. running: the sequences that the viewer may see."""
        tables = self._update_tables()
        owners = [seen.owners.number(seq.id) for seq in running]
        pools = self._scheduler.cache.pools
        codes = [self._codes_without_owners(seen.watcher, group, pool) for group, pool in enumerate(pools)]
        for group, some in enumerate(codes):
            block_states.set_owners(some, owners, [tables[seq.id][group].present for seq in running])
        if (states := self._scheduler.cache.states) is not None:
            live = [[] if seq.table is None or seq.table.state is None else [seq.table.state.block] for seq in running]
            codes.append(self._codes_of_states(seen.watcher, states))
            block_states.set_owners(codes[-1], owners, [np.array(blocks, np.intp) for blocks in live])
        return codes

    def _codes_of_states(self, watcher: Watcher, states: StateBlocks) -> np.ndarray:
        """Codes of the blocks of recurrent states, without those of running sequences that the viewer may see."""
        cache, anchors = self._scheduler.cache, states.anchors
        if watcher.sees_all:
            in_flight = np.fromiter(cache.blocks_in_flight(len(cache.pools)), np.intp)
            rest, snapshots = (in_flight, block_states.USED), list(anchors)
        else:
            own = {block for node in visible_nodes(cache.index, watcher) for block in node.blocks[0]}
            rest = np.arange(states.pool.num_blocks), block_states.OTHER
            snapshots = [block for block, anchor in anchors.items() if anchor in own]
        return block_states.block_codes(states.pool.num_blocks, [rest, (snapshots, block_states.CACHED)])

    def _codes_without_owners(self, watcher: Watcher, group: int, pool: BlockPool) -> np.ndarray:
        """Codes of one group's blocks, without those of running sequences that the viewer may see."""
        cache = self._scheduler.cache
        retention = cache.index.retention
        pinned = [] if retention is None else list(retention.pin_refs(group))
        if watcher.sees_all:
            in_flight = np.fromiter(cache.blocks_in_flight(group), np.intp)
            marks = (in_flight, block_states.USED), (pool.indexed_blocks, block_states.CACHED)
            return block_states.block_codes(pool.num_blocks, [*marks, (pinned, block_states.PINNED)])
        nodes = visible_nodes(cache.index, watcher)
        own = [block for node in nodes for block in node.blocks[group] if block != ABSENT]
        own_pinned = sorted(set(own).intersection(pinned)) if pinned else []
        rest = np.arange(pool.num_blocks), block_states.OTHER
        own_marks = [(own, block_states.CACHED), (own_pinned, block_states.PINNED)]
        return block_states.block_codes(pool.num_blocks, [rest, *own_marks])

    def _update_tables(self) -> dict[int, list[TableBlocks]]:
        """The blocks of all tables by sequence id, per group."""
        tables = self._scheduler.cache.tables
        for seq_id in [one for one in self._tables if one not in tables]:
            del self._tables[seq_id]
        for seq_id, table in tables.items():
            known = self._tables.get(seq_id)
            if known is None:
                known = self._tables[seq_id] = [TableBlocks() for _ in table.blocks]
            for ours, blocks in zip(known, table.blocks, strict=True):
                ours.update(blocks)
        return self._tables

    def _host_codes(self, seen: Viewer, holders: list[Sequence]) -> list[np.ndarray]:
        """Codes of the host's blocks, per group. holders: sequences that the viewer may see."""
        cache = self._scheduler.cache
        if not cache.host_pools.num_blocks:
            return [np.empty(0, np.int32) for _ in cache.host_pools]
        rest = block_states.HOST if seen.watcher.sees_all else block_states.OTHER
        codes = [np.full(pool.num_blocks, rest, np.int32) for pool in cache.host_pools]
        for some, pool in zip(codes, cache.host_pools, strict=True) if seen.watcher.sees_all else ():
            some[list(pool.free_blocks)] = block_states.FREE
        for seq in reversed(holders):  # a shared block has the number of the first
            record = cache.swapped.get(seq.id)
            for group, block in () if record is None else record.host_blocks():
                codes[group][block] = block_states.HOST | seen.owners.number(seq.id)
        return codes

    def _pool_figures(self, watcher: Watcher, device: list[np.ndarray], host: list[np.ndarray]) -> list[PoolFigures]:
        cache = self._scheduler.cache
        rest = block_states.FREE if watcher.sees_all else block_states.OTHER
        return [
            PoolFigures(
                str(group.kind),
                cache.block_size if isinstance(group, KVGroup) else 0,
                group.num_blocks,
                int(np.count_nonzero(codes == rest)),
                int(np.count_nonzero((codes == block_states.CACHED) | (codes == block_states.PINNED))),
                len(host_codes),
                int(np.count_nonzero(host_codes != rest)),
            )
            for group, codes, host_codes in zip(cache.config.pools, device, host, strict=True)
        ]

    # Trees, steps, totals

    def _tree_view(self, watcher: Watcher, running: list[Sequence]) -> TreeView | None:
        """The trees as a watcher sees them, up to date; None without trees."""
        index = self._scheduler.cache.index
        if index is not self._trees.index:  # a repair has replaced it
            self._trees = TreeViews(index)
        self._trees.keep(one.watcher for one in self._viewers.values())
        states = self._scheduler.cache.states
        anchors = frozenset() if states is None else frozenset(states.anchors.values())
        return self._trees.view(watcher, [seq.table for seq in running if seq.table is not None], anchors)

    def _tree(self, seen: Viewer, view: TreeView | None) -> TreeChanges:
        """What changed of the trees since the viewer has seen them."""
        if view is None:
            return TreeChanges([], [], [], 0, 0)
        num_nodes = num_visible(self._scheduler.cache.index, seen.watcher)
        changes = view.all_rows(num_nodes) if seen.tree is None else view.changes(seen.tree_version, num_nodes)
        seen.tree, seen.tree_version = view, view.version
        return changes

    def _steps(self, seen: Viewer, *, full: bool) -> list[StepRow]:
        """The steps that are new to a viewer, and those of which it has not seen the measured seconds."""
        assert self._scheduler.step_log is not None, "it is recorded while there are viewers"
        known, rows = seen.unmeasured, []
        seen.unmeasured = set()
        for step in self._scheduler.step_log.steps():
            if not step.is_over:
                seen.unmeasured.add(step.id)
            is_news = step.id > seen.last_step or (step.id in known and step.is_over)
            if (full or is_news) and (row := _step_row(step, seen.watcher)) is not None:
                rows.append(row if seen.watcher.sees_all else row._replace(id=self._own_number(seen, step.id)))
        seen.last_step = self._scheduler.last_step
        return rows

    def _own_number(self, seen: Viewer, step_id: int) -> int:
        """The number of a step among those with sequences of the viewer: ids of steps would count those of others."""
        if step_id not in seen.own_steps:
            seen.own_steps[step_id] = max(seen.own_steps.values(), default=-1) + 1
            if len(seen.own_steps) > 2 * MOST_STEPS:
                del seen.own_steps[min(seen.own_steps)]
        return seen.own_steps[step_id]

    def _totals(self, watcher: Watcher, unfinished: Iterator[Sequence]) -> Totals:
        stats = self._scheduler.request_stats
        total = Totals()
        for one in stats.totals.values() if watcher.sees_all else [stats.totals.get(watcher.tenant, total)]:
            total = Totals(*(a + b for a, b in zip(structs.astuple(total), structs.astuple(one), strict=True)))
        num_more = sum(seq.num_generated for seq in unfinished)
        return structs.replace(total, output_tokens=total.output_tokens + num_more)


def _changes(before: list[np.ndarray] | None, codes: list[np.ndarray]) -> list[BlockRun]:
    return [
        (pool, first, runs)
        for pool, some in enumerate(codes)
        for first, runs in block_states.changed_runs(None if before is None else before[pool], some)
    ]


def _reason(cause: str) -> str:
    """A cause of waiting, in words. Prerequisites without an own text have their name."""
    return f"{cause}: {_WAITS.get(cause, 'it is not ready')}"


def _step_row(step: LoggedStep, watcher: Watcher) -> StepRow | None:
    """The row of a step; None if it has no sequence that the watcher may see."""
    tokens = StepTokens()
    for tenant, some in step.tokens.items():
        if watcher.sees_all or tenant == watcher.tenant:
            tokens.add_all(some)
    if not (watcher.sees_all or tokens.num_seqs):
        return None
    counts = (tokens.prompt, tokens.decode, tokens.drafts, tokens.accepted, tokens.num_seqs)
    if not watcher.sees_all:
        return StepRow(step.id, step.at, None, None, *counts, None, None, None)
    counters = (step.num_waiting, step.preemptions, step.evicted_blocks)
    return StepRow(step.id, step.at, step.predicted, step.measured, *counts, *counters)

"""Retention of KV in the radix tree: the marks at nodes, when they apply, and the eviction order that they change.

A mark is at the node where a sequence ended and applies to all blocks before it too. It moves up when a leaf is
evicted. All marks of a branch of a program share one RetentionHint, so that the hint of its latest request applies to
the whole branch (docs/programs.md). The number of marks per branch is limited, so that the end of a request does not
get slower as a branch grows.

If nothing runs and the next sequence does not fit, pins end, the weakest first, so that no request waits forever. A
flush ends all pins.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from quire.cache.block_pool import BlockPool
from quire.cache.prefix.eviction import DeferredLeaves, EvictionKey, EvictionPolicy, OrderedLeaves
from quire.cache.prefix.pins import Pins
from quire.cache.prefix.radix_node import Clock, Node
from quire.cache.retention import (
    NO_STAGE,
    BranchKey,
    Mark,
    RetentionHint,
    SequenceRetention,
    Stage,
    merge_marks,
    stage_at,
)
from quire.core.events import Event, PinsRefused, PinsYielded
from quire.core.scheduling_params import Program, Retention

MAX_NODES_PER_BRANCH = 256  # nodes with marks of one branch of a program

_DEFAULT_RETENTION = Retention()


class RetentionMarks:
    """All retention that applies to some node, and the pins."""

    def __init__(
        self, pools: Sequence[BlockPool], clock: Clock, key_bytes: int, relist: Callable[[Node], None]
    ) -> None:
        """key_bytes: of a block. relist(node): its eviction key may have fallen, or it has idle blocks again."""
        self.events: list[Event] = []
        self._clock = clock
        self._relist = relist
        self.nodes: dict[RetentionHint, dict[int, Node]] = {}  # nodes with marks of a hint, the latest last
        self.branch_hints: dict[BranchKey, RetentionHint] = {}
        self.branches: dict[tuple[str, str], dict[BranchKey, None]] = {}  # keys of hints, by tenant and program
        self._expiries: list[tuple[float, int, RetentionHint]] = []
        self._pins = Pins(pools, key_bytes)
        self._num_hints = 0

    def apply(self, ends: Sequence[Node], retention: SequenceRetention) -> None:
        """Apply the retention of a sequence that ended.

        ends: the nodes where it ends; several if a part of it is public, or a tail.
        """
        if retention.program is not None:
            self._apply_to_branch(ends, retention, retention.program)
        if retention.program is None or retention.params != _DEFAULT_RETENTION:
            self._apply_to_request(ends, retention)

    def _apply_to_request(self, ends: Sequence[Node], retention: SequenceRetention) -> None:
        if retention.params == _DEFAULT_RETENTION:
            for node in ends:
                node.default_reach = node.end
            return
        hint = self._new_hint(retention)
        hint.set_retention(retention.params, self._clock.now)
        marked = self._add_marks(ends, hint)
        if hint.pin and marked:
            self._pin_paths(hint, marked, retention)
        for node in marked:
            self._relist(node)

    def _apply_to_branch(self, ends: Sequence[Node], retention: SequenceRetention, program: Program) -> None:
        key = retention.tenant, program.id, program.branch
        hint = self.branch_hints.get(key)
        if hint is None:
            hint = self.branch_hints[key] = self._new_hint(retention, key)
            self.branches.setdefault(key[:2], {})[key] = None
        before = hint.state
        if program.expects_more:
            hint.set_expects_more(retention.program_age, self._clock.now + program.ttl)
        else:
            hint.set_finished()
        marked = self._add_marks(ends, hint)
        if hint not in self.nodes:  # no blocks left, or stronger marks of others at the node
            if self.branch_hints.get(key) is hint:
                self._forget_branch(key)
            return
        places = self.nodes[hint]
        for node in marked:
            places[node.id] = places.pop(node.id)  # the latest
        while len(places) > MAX_NODES_PER_BRANCH:
            self._unmark(next(iter(places.values())), hint)
        for node in list(places.values()) if hint.state.protects_less_than(before) else marked:
            self._relist(node)

    def _add_marks(self, ends: Sequence[Node], hint: RetentionHint) -> list[Node]:
        """Mark the nodes where a sequence ended. Returns those that have the mark."""
        for node in ends:
            if node.parent is not None:
                self._merge_marks(node, (*node.marks, Mark(hint, node.end)))
        if hint in self.nodes and hint.expires < inf:
            self._schedule_expiry(hint)
        return [node for node in ends if node.id in self.nodes.get(hint, ())]

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """End a branch of a program (None: all): no request will continue from its KV. Ignores unknown ones."""
        keys = list(self.branches.get((tenant, program), ())) if branch is None else [(tenant, program, branch)]
        for key in keys:
            hint = self.branch_hints.get(key)
            if hint is not None:
                hint.set_finished()
                for node in list(self.nodes.get(hint, {}).values()):
                    self._relist(node)

    def _schedule_expiry(self, hint: RetentionHint) -> None:
        heappush(self._expiries, (hint.expires, hint.number, hint))
        if len(self._expiries) > 2 * len(self.nodes) + 64:
            self._expiries = [(one.expires, one.number, one) for one in self.nodes if one.expires < inf]
            heapify(self._expiries)

    def _pin_paths(self, hint: RetentionHint, nodes: Iterable[Node], retention: SequenceRetention) -> None:
        """Pin the paths to some nodes, within the limits. Adds an event if blocks were not pinned."""
        refused: set[tuple[int, int]] = set()
        held: set[tuple[int, int]] = set()
        for node in nodes:
            not_held, are_held = self._pins.pin(hint, node)
            refused |= not_held
            held |= are_held
        if refused:
            self.events.append(PinsRefused(self._clock.now, retention.request_id, len(refused), len(held)))

    def _new_hint(self, retention: SequenceRetention, branch: BranchKey | None = None) -> RetentionHint:
        self._num_hints += 1
        return RetentionHint(self._num_hints, branch, retention.tenant, retention.request_id)

    def _forget_branch(self, key: BranchKey) -> None:
        """Forget a branch without marks."""
        del self.branch_hints[key]
        keys = self.branches[key[:2]]
        del keys[key]
        if not keys:
            del self.branches[key[:2]]

    # Marks

    def _merge_marks(self, node: Node, marks: tuple[Mark, ...]) -> None:
        """Set the marks of a node to `marks`, without expired and excess ones."""
        self._set_marks(node, merge_marks(marks, self._clock.now))
        kept = {hint for hint, _ in node.marks}
        if any(hint not in kept for hint, _ in marks):
            self._relist(node)

    def _set_marks(self, node: Node, marks: tuple[Mark, ...]) -> None:
        before, node.marks = node.marks, marks
        for hint, _ in marks:
            self.nodes.setdefault(hint, {})[node.id] = node
        kept = {hint for hint, _ in marks}
        for hint, _ in before:
            if hint not in kept:
                self._forget(hint, node)

    def _unmark(self, node: Node, hint: RetentionHint) -> None:
        """Remove the mark of a hint from a node."""
        self._set_marks(node, tuple(mark for mark in node.marks if mark.hint is not hint))
        self._relist(node)

    def _forget(self, hint: RetentionHint, node: Node) -> None:
        self._pins.unpin(hint, node)
        nodes = self.nodes[hint]
        del nodes[node.id]
        if not nodes:
            del self.nodes[hint]
            if hint.branch is not None:
                self._forget_branch(hint.branch)

    def _move_marks(self, node: Node, other: Node) -> None:
        """Remove all marks of a node. Pins of hints that are also at `other` move there."""
        kept = {hint for hint, _ in other.marks}
        for hint, _ in node.marks:
            if hint in kept:
                self._pins.move(hint, node, other)
        self._set_marks(node, ())

    def move_to_parent(self, leaf: Node, parent: Node) -> None:
        """A leaf is about to leave the tree: its marks, which apply to the blocks before it too, move to its parent."""
        parent.default_reach = max(parent.default_reach, min(leaf.default_reach, parent.end))
        if leaf.marks:
            if parent.parent is not None:
                moved = (Mark(hint, min(reach, parent.end)) for hint, reach in leaf.marks)
                self._merge_marks(parent, (*parent.marks, *moved))
            self._move_marks(leaf, parent)

    def merge_nodes(self, upper: Node, node: Node) -> None:
        """The run of `upper` has become the first section of `node`: its marks move there."""
        node.default_reach = max(node.default_reach, upper.default_reach)
        if upper.marks:
            self._merge_marks(node, (*upper.marks, *node.marks))
            self._move_marks(upper, node)

    # Expiry

    def advance_clock(self, now: float) -> None:
        """Advance the clock and remove the marks of expired hints."""
        now = self._clock.now = max(now, self._clock.now)
        while self._expiries and self._expiries[0][0] <= now:
            hint = heappop(self._expiries)[2]
            if hint in self.nodes and hint.expires <= now:
                for node in list(self.nodes[hint].values()):
                    self._unmark(node, hint)

    # Pins

    def is_pinned(self, leaf: Node) -> bool:
        """Whether the last block of a leaf is pinned, in any group."""
        return self._pins.is_pinned(leaf, -1)

    def pin_refs(self, group: int) -> Counter[int]:
        """References of pins, per block."""
        return self._pins.references(group)

    def end_weakest_pin(self) -> bool:
        """End the weakest pin, so that a sequence can run. Returns False if there is none."""
        hint = self._pins.weakest
        if hint is None:
            return False
        self.events.append(PinsYielded(self._clock.now, hint.request_id, self._pins.num_blocks(hint)))
        self._end_pin(hint)
        return True

    def end_pins(self) -> None:
        """End all pins."""
        for hint in self._pins.hints:
            self._end_pin(hint)

    def unpin_invalid(self) -> None:
        """End the pins of blocks that have left the index without an eviction."""
        self._pins.unpin_invalid()

    def _end_pin(self, hint: RetentionHint) -> None:
        self._pins.unpin_all(hint)
        hint.pin = False
        for node in list(self.nodes.get(hint, {}).values()):
            self._relist(node)

    # Checks

    def node_errors(self, node: Node, windowed: Collection[int]) -> list[str]:
        """Errors of the marks and pins of a node; empty if there are none."""
        unknown = [hint.number for hint, _ in node.marks if self.nodes.get(hint, {}).get(node.id) is not node]
        wrong = [f"hints {unknown} do not have it"] if unknown else []
        return [*wrong, *self._pins.node_errors(node, windowed)]


class _HintedPolicy:
    """An eviction policy with program hints as the first part of the key. See EvictionPolicy."""

    def __init__(self, policy: EvictionPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock

    def on_use(self, node: Node) -> None:
        """See EvictionPolicy."""
        self._policy.on_use(node)

    def on_evict(self, leaf: Node) -> None:
        """See EvictionPolicy."""
        self._policy.on_evict(leaf)

    def stage(self, leaf: Node) -> Stage:
        """The program hint for the last block of a leaf."""
        return stage_at(leaf.marks, leaf.default_reach, leaf.end, self._clock.now) if leaf.marks else NO_STAGE

    def eviction_key(self, leaf: Node) -> EvictionKey:
        """See EvictionPolicy."""
        return *self.stage(leaf), *self._policy.eviction_key(leaf)

    def reason(self, leaf: Node) -> dict[str, float]:
        """See EvictionPolicy. program: 1 if a program will continue from it, -1 if it has finished."""
        stage, _ = self.stage(leaf)
        reason = self._policy.reason(leaf)
        return {**reason, "program": stage} if stage else reason


class _TenantOrder(_HintedPolicy):
    """The order that selects the tenant: without hints, but finished branches come first. See EvictionPolicy."""

    def __init__(self, policy: EvictionPolicy, clock: Clock) -> None:
        super().__init__(policy, clock)
        # Leaves that have the eviction key of another leaf: their tick at that time, and the key.
        self._swapped_keys: dict[int, tuple[int, EvictionKey]] = {}

    def eviction_key(self, leaf: Node) -> EvictionKey:
        """See EvictionPolicy."""
        return *min(self.stage(leaf), NO_STAGE), *self._current_key(leaf)

    def _current_key(self, leaf: Node) -> EvictionKey:
        tick, place = self._swapped_keys.get(leaf.id, (-1, ()))
        return place if tick == leaf.tick else self._policy.eviction_key(leaf)

    def swap_keys(self, one: Node, other: Node) -> None:
        """Swap the eviction keys of two leaves, each until it is used again."""
        place = self._current_key(one)
        self._swapped_keys[one.id] = one.tick, self._current_key(other)
        self._swapped_keys[other.id] = other.tick, place

    def restore_key(self, leaf: Node) -> bool:
        """Give a leaf its own eviction key back. Returns whether it had another one."""
        return self._swapped_keys.pop(leaf.id, None) is not None


class LeavesByTenant:
    """Leaves in the order of an eviction policy with program hints. See EvictableLeaves.

    The first leaf in the policy's order selects the tenant. Hints then select which of its leaves is evicted, so they
    cannot protect KV at the expense of other tenants.
    """

    def __init__(self, policy: EvictionPolicy, clock: Clock) -> None:
        self._hinted_policy = _HintedPolicy(policy, clock)
        self._tenant_order = _TenantOrder(policy, clock)
        self._all = OrderedLeaves(self._tenant_order)
        self._by_tenant: dict[str, OrderedLeaves] = {}  # the same leaves, by tenant
        self._deferred = DeferredLeaves()

    def __contains__(self, node: Node) -> bool:
        return node in self._all or node in self._deferred

    def __len__(self) -> int:
        return len(self._all)

    def add(self, node: Node) -> None:
        """See EvictableLeaves."""
        self._deferred.discard(node)
        self._all.add(node)
        own = self._by_tenant.get(node.tenant)
        if own is None:
            own = self._by_tenant[node.tenant] = OrderedLeaves(self._hinted_policy)
        own.add(node)

    def update(self, node: Node) -> None:
        """See EvictableLeaves."""
        if node in self._all:
            self._all.update(node)
            self._by_tenant[node.tenant].update(node)

    def discard(self, node: Node) -> None:
        """See EvictableLeaves."""
        self._deferred.discard(node)
        self._tenant_order.restore_key(node)
        self._remove(node)

    def _remove(self, node: Node) -> None:
        if node in self._all:
            self._all.discard(node)
            own = self._by_tenant[node.tenant]
            own.discard(node)
            if not len(own):
                del self._by_tenant[node.tenant]

    def defer(self, node: Node) -> None:
        """See EvictableLeaves."""
        if node not in self._all:
            self._deferred.add(node)

    def requeue_deferred(self) -> None:
        """See EvictableLeaves."""
        for node in self._deferred.pop_some():
            self.add(node)

    def pop(self) -> Node | None:
        """See EvictableLeaves."""
        first = self._all.peek()
        if first is None:
            return self._deferred.pop()
        node = self._by_tenant[first.tenant].peek()
        assert node is not None, "the tenant has a leaf"
        if first is not node:  # a hint spares it
            self._tenant_order.swap_keys(first, node)
        self._remove(node)
        return node

    def on_use(self, node: Node) -> None:
        """See EvictableLeaves."""
        self._all.on_use(node)
        if self._tenant_order.restore_key(node):
            self.update(node)

    def on_evict(self, leaf: Node) -> None:
        """See EvictableLeaves."""
        self._all.on_evict(leaf)

    def reason(self, leaf: Node) -> dict[str, float]:
        """See EvictableLeaves."""
        return self._hinted_policy.reason(leaf)

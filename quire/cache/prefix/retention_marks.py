"""Retention of KV in the radix tree: the marks at nodes, when they apply, and the eviction order that they change.

A mark is at the node where a sequence ended and applies to all blocks before it too. It moves up when a leaf is
evicted. All marks of a session share one RetentionHint, so that the retention of its latest request applies to the
whole session. The number of marks per session is limited, so that the end of a request does not get slower as a session
grows. A branch of a program is such a session too; its hints are its retention (docs/programs.md).

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
    NO_HINT,
    NO_STAGE,
    HintState,
    Mark,
    RetentionHint,
    SequenceRetention,
    SessionKey,
    Stage,
    merge_marks,
    stage_at,
)
from quire.core.events import Event, PinsRefused, PinsYielded
from quire.core.scheduling_params import Retention

MAX_NODES_PER_SESSION = 256  # nodes with marks of one session

_SESSION_KEY_LEN = 2  # length of the key of a session; that of a branch is longer by one
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
        self.sessions: dict[SessionKey, RetentionHint] = {}
        self.branches: dict[SessionKey, dict[SessionKey, None]] = {}  # keys of sessions by tenant and program
        self._expiries: list[tuple[float, int, RetentionHint]] = []
        self._pins = Pins(pools, key_bytes)
        self._num_hints = 0

    def apply(self, ends: Sequence[Node], retention: SequenceRetention) -> None:
        """Apply the retention of a sequence that ended.

        ends: the nodes where it ends; several if a part of it is public, or a tail.
        """
        if retention.program is not None:
            self._apply_hint(ends, retention, self._hint_of_branch(retention))
        if retention.program is None or retention.params != _DEFAULT_RETENTION:
            self._apply_hint(ends, retention, self._hint_of_request(retention))

    def _apply_hint(self, ends: Sequence[Node], retention: SequenceRetention, hint: RetentionHint) -> None:
        asked_before = hint.state
        self._update_hint(hint, retention)
        for node in ends:
            if node.parent is not None:
                self._merge_marks(node, (*node.marks, Mark(hint, node.end)))
        places = self.nodes.get(hint)
        if places is None:  # no retention, no blocks left, or stronger marks of others at the node
            if hint.session is not None and self.sessions.get(hint.session) is hint:
                self._end_session(hint.session)
            return
        new = [node for node in ends if node.id in places]
        for node in new:
            places[node.id] = places.pop(node.id)  # the latest
        while len(places) > MAX_NODES_PER_SESSION:
            self._unmark(next(iter(places.values())), hint)
        if hint.expires < inf:
            self._schedule_expiry(hint)
        self._apply_change(hint, asked_before, new, retention)

    def _update_hint(self, hint: RetentionHint, retention: SequenceRetention) -> None:
        """Set the hint from the request that has just ended."""
        if hint is NO_HINT:
            return
        hint.request_id = retention.request_id
        if hint.session is None or len(hint.session) == _SESSION_KEY_LEN:
            hint.set_retention(retention.params, self._clock.now)
        elif retention.program is not None and retention.program.expects_more:
            hint.set_expects_more(retention, self._clock.now)
        else:
            hint.set_finished()

    def end_program(self, tenant: str, program: str, branch: str | None) -> None:
        """End a branch of a program (None: all): no request will continue from its KV. Ignores unknown ones."""
        keys = list(self.branches.get((tenant, program), ())) if branch is None else [(tenant, program, branch)]
        for key in keys:
            hint = self.sessions.get(key)
            if hint is not None:
                hint.set_finished()
                for node in list(self.nodes.get(hint, {}).values()):
                    self._relist(node)

    def _schedule_expiry(self, hint: RetentionHint) -> None:
        heappush(self._expiries, (hint.expires, hint.number, hint))
        if len(self._expiries) > 2 * len(self.nodes) + 64:
            self._expiries = [(one.expires, one.number, one) for one in self.nodes if one.expires < inf]
            heapify(self._expiries)

    def _apply_change(
        self, hint: RetentionHint, before: HintState, new: Sequence[Node], retention: SequenceRetention
    ) -> None:
        """Apply a changed hint: to its new nodes, and to its other nodes only as far as its retention changed."""
        places = list(self.nodes[hint].values())
        if hint.pin:
            self._pin_paths(hint, new if before.pin else places, retention)
        elif before.pin:
            self._pins.unpin_all(hint)
        for node in places if hint.state.protects_less_than(before) else new:
            self._relist(node)

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

    def _hint_of_request(self, retention: SequenceRetention) -> RetentionHint:
        """The hint of a request that has just ended: NO_HINT without retention, that of its session, or a new one."""
        asked = retention.params
        if asked == _DEFAULT_RETENTION:
            return NO_HINT
        if asked.session is None:
            return self._new_hint(None, retention)
        return self._hint_of_session((retention.tenant, asked.session), retention)

    def _hint_of_branch(self, retention: SequenceRetention) -> RetentionHint:
        """The hint of the program branch that a request belongs to."""
        assert retention.program is not None, "a request of a program"
        key = retention.tenant, retention.program.id, retention.program.branch
        self.branches.setdefault(key[:_SESSION_KEY_LEN], {})[key] = None
        return self._hint_of_session(key, retention)

    def _hint_of_session(self, key: SessionKey, retention: SequenceRetention) -> RetentionHint:
        hint = self.sessions.get(key)
        if hint is None:
            hint = self.sessions[key] = self._new_hint(key, retention)
        return hint

    def _new_hint(self, key: SessionKey | None, retention: SequenceRetention) -> RetentionHint:
        self._num_hints += 1
        return RetentionHint(self._num_hints, key, retention.tenant)

    def _end_session(self, key: SessionKey) -> None:
        """Delete a session without marks."""
        del self.sessions[key]
        if len(key) > _SESSION_KEY_LEN:
            branches = self.branches[key[:_SESSION_KEY_LEN]]
            del branches[key]
            if not branches:
                del self.branches[key[:_SESSION_KEY_LEN]]

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
            if hint is not NO_HINT:
                self.nodes.setdefault(hint, {})[node.id] = node
        kept = {hint for hint, _ in marks}
        for hint, _ in before:
            if hint not in kept and hint is not NO_HINT:
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
            if hint.session is not None:
                self._end_session(hint.session)

    def _move_marks(self, node: Node, other: Node) -> None:
        """Remove all marks of a node. Pins of hints that are also at `other` move there."""
        kept = {hint for hint, _ in other.marks}
        for hint, _ in node.marks:
            if hint in kept:
                self._pins.move(hint, node, other)
        self._set_marks(node, ())

    def move_to_parent(self, leaf: Node, parent: Node) -> None:
        """A leaf is about to leave the tree: its marks, which apply to the blocks before it too, move to its parent."""
        if leaf.marks:
            if parent.parent is not None:
                moved = (Mark(hint, min(reach, parent.end)) for hint, reach in leaf.marks)
                self._merge_marks(parent, (*parent.marks, *moved))
            self._move_marks(leaf, parent)

    def merge_nodes(self, upper: Node, node: Node) -> None:
        """The run of `upper` has become the first section of `node`: its marks move there."""
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
        unknown = [
            hint.number
            for hint, _ in node.marks
            if hint is not NO_HINT and self.nodes.get(hint, {}).get(node.id) is not node
        ]
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
        return stage_at(leaf.marks, leaf.end, self._clock.now) if leaf.marks else NO_STAGE

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
        node = self.peek()
        if node is None:
            return self._deferred.pop()
        spared = self._all.peek()
        if spared is not None and spared is not node:
            self._tenant_order.swap_keys(spared, node)
        self._remove(node)
        return node

    def peek(self) -> Node | None:
        """The leaf that `pop` would return, of those that are not set aside."""
        first = self._all.peek()
        return None if first is None else self._by_tenant[first.tenant].peek()

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

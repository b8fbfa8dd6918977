"""The keys of the whole blocks in the radix trees, as a router outside of the engine sees them change.

A key is that of `core/block_keys.py`, with the secret of the fleet. A block counts once the step that writes it is
committed, and until it is evicted. A model with recurrent states also reports the keys of its snapshots (`state_key`).
"""

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from quire.cache.manager import KVCacheManager
from quire.cache.prefix.index import PrefixIndex, PublicPrefixes
from quire.cache.prefix.radix_index import RadixIndex
from quire.cache.prefix.radix_node import Node
from quire.cache.prefix.radix_search import root_key_of
from quire.cache.states import StateBlocks
from quire.core.block_keys import BYTES_PER_TOKEN, BlockKeys, state_key
from quire.core.request import Namespace

_MOST_ROOTS = 1024  # whose keys are kept


class KeyChanges(msgspec.Struct, frozen=True, array_like=True):
    """Keys that came and keys that left."""

    added: list[bytes] = []
    removed: list[bytes] = []


class CachedKeysOf:
    """The keys of a cache, whose index a repair may replace."""

    def __init__(self, cache: KVCacheManager, block_keys: BlockKeys) -> None:
        self._cache = cache
        self._block_keys = block_keys
        self._public = PublicPrefixes(cache.config.public_prefixes, block_keys.block_size * BYTES_PER_TOKEN)
        self._report = self._new_report()

    def take(self) -> KeyChanges:
        """The changes since the last call."""
        before, report = self._report, self._report
        if self._cache.index is not before.index:
            report = self._report = self._new_report()
        changes = report.take(self._cache.unwritten_blocks)
        if report is before:
            return changes
        return KeyChanges(sorted(report.keys - before.keys), sorted(before.keys - report.keys))

    def _new_report(self) -> "KeyReport":
        return KeyReport(self._cache.index, self._block_keys, self._public, self._cache.states)


class _Run(NamedTuple):
    """The reported blocks at the beginning of a node."""

    before: bytes  # the key before the first
    edge: bytes  # the key of their tokens, in the tree
    keys: list[bytes]
    blocks: list[int]  # of group 0; empty for a model without recurrent states


class KeyReport:
    """The keys of one index that were reported.

    public: those of the index. An index without trees has no keys. states: of a model with recurrent states.
    """

    def __init__(
        self, index: PrefixIndex, block_keys: BlockKeys, public: PublicPrefixes, states: StateBlocks | None = None
    ) -> None:
        self.index = index
        self._block_keys = block_keys
        self._size = block_keys.block_size * BYTES_PER_TOKEN
        self._public = public
        self._states = states
        self._key_of: dict[int, bytes] = {}  # the key of each reported block, for a model with recurrent states
        self._state_key_of: dict[int, bytes] = {}  # the reported key of the snapshot of each block that has one
        self._trees = index.trees if isinstance(index, RadixIndex) else None
        self._changes = None if self._trees is None else self._trees.report_changes(counts_uses=False)
        self._runs: dict[Node, _Run] = {}
        self._unwritten: set[Node] = set()  # nodes with blocks of steps that were not committed
        self._is_new = True
        self._root_keys: dict[tuple[Namespace, bytes], bytes] = {}

    @property
    def keys(self) -> set[bytes]:
        """All keys that were reported."""
        return {*self._state_key_of.values()}.union(*(run.keys for run in self._runs.values()))

    def take(self, unwritten: Collection[int]) -> KeyChanges:
        """The changes since the last call. unwritten: blocks of group 0 that uncommitted steps write."""
        changed_blocks: set[int] = set()
        changes = self._take_blocks(unwritten, changed_blocks)
        if self._states is None:
            return changes
        old, new = self._take_snapshots(self._states.written_anchors, changed_blocks)
        return KeyChanges(changes.added + sorted(new - old), changes.removed + sorted(old - new))

    def _take_snapshots(self, anchors: set[int], changed_blocks: set[int]) -> tuple[set[bytes], set[bytes]]:
        """The keys of snapshots that left, and those that came; one may be in both."""
        known, old, new = self._state_key_of, set(), set()
        for block in (known.keys() ^ anchors) | (known.keys() & changed_blocks):
            if block in known:
                old.add(known.pop(block))
            if block in anchors and block in self._key_of:
                known[block] = state_key(self._key_of[block])
                new.add(known[block])
        return old, new

    def _take_blocks(self, unwritten: Collection[int], changed_blocks: set[int]) -> KeyChanges:
        """The changes of blocks. Adds to `changed_blocks` those whose key may be another, if there are states."""
        if self._trees is None or self._changes is None:
            return KeyChanges()
        changed = self._changes.take()
        if changed is None or self._is_new:
            changed = {*self._runs, *self._trees.nodes()}
            self._is_new = False
        changed |= self._unwritten
        if not changed:
            return KeyChanges()
        self._unwritten = set()
        old: set[bytes] = set()
        new: set[bytes] = set()
        lost: list[int] = []
        found: dict[int, bytes] = {}
        for node in sorted(changed, key=lambda node: node.end):  # a chain continues that of its parent
            run = self._runs.pop(node, None)
            if node.is_removed or node.parent is None:
                old.update([] if run is None else run.keys)
                lost += [] if run is None else run.blocks
                continue
            now, num_kept = self._run_of(node, run, unwritten)
            if run is not None:
                old.update(run.keys[num_kept:])
                lost += run.blocks
            if now.keys:
                self._runs[node] = now
                new.update(now.keys[num_kept:])
                found.update(zip(now.blocks, now.keys, strict=False))
        for block in lost:
            self._key_of.pop(block, None)
        self._key_of.update(found)
        changed_blocks.update(lost, found)
        return KeyChanges(sorted(new - old), sorted(old - new))

    def _run_of(self, node: Node, known: _Run | None, unwritten: Collection[int]) -> tuple[_Run, int]:
        """The run of a node, and how many of its keys are those of `known`."""
        before = self._key_before(node)
        if before is None:
            self._unwritten.add(node)
            return _Run(b"", b"", [], []), 0
        num_blocks = len(node.edge) // self._size  # of a tail none is whole
        if unwritten:
            written = next((i for i, block in enumerate(node.blocks[0]) if block in unwritten), num_blocks)
            if written < num_blocks:
                self._unwritten.add(node)
                num_blocks = written
        edge, keys = node.edge[: num_blocks * self._size], []
        if known is not None and known.before == before:
            keys = known.keys if edge.startswith(known.edge) else []
            if known.edge.startswith(edge):
                keys = known.keys[:num_blocks]
        num_kept = len(keys)
        keys = [*keys, *self._block_keys.continued(keys[-1] if keys else before, edge[num_kept * self._size :])]
        blocks = [] if self._states is None else node.blocks[0][: len(keys)]
        return _Run(before, edge, keys, blocks), num_kept

    def _key_before(self, node: Node) -> bytes | None:
        """The key before the first block of a node; None if a block before it is not written."""
        parent = node.parent
        assert parent is not None, "a root has no blocks"
        if parent.parent is not None:
            run = self._runs.get(parent)
            return run.keys[-1] if run is not None and len(run.keys) == len(parent.blocks[0]) else None
        root = root_key_of(parent)
        if root not in self._root_keys:
            if len(self._root_keys) >= _MOST_ROOTS:
                self._root_keys.clear()
            self._root_keys[root] = self._key_of_root(*root)
        return self._root_keys[root]

    def _key_of_root(self, namespace: Namespace, data: bytes) -> bytes:
        """data: the tokens before a root that is not the first one of its prompts."""
        if not data:
            return self._block_keys.root(namespace)
        public = self._public.root_key(namespace)[0]
        *_, last = self._block_keys.chain(
            data, namespace, public=public, num_public=self._public.num_blocks(namespace, data)
        )
        return self._block_keys.root(namespace, last)

"""The prefix index by chained block hashes, as in vLLM's automatic prefix caching. It matches whole blocks.

The key of a block (`core/block_keys.py`) identifies the whole prefix, beginning with the namespace.

Entries are independent: an entry stays when the one before it is evicted, and is found again when that one is computed
again. Unused entries are evicted in the order in which their last table released them; a table releases the end of its
chain first.

Invariants, which `check` verifies: an entry counts as used, per group, by the tables whose chains contain it and whose
windows had not passed it at the last update. A used entry has a block, which is that of the table. An entry with a
block that is not used can be evicted.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable, IndexHandle
from quire.cache.prefix.index import (
    NO_REASON,
    EvictionCause,
    EvictionReason,
    InsertResult,
    PrefixMatch,
    PublicPrefixes,
)
from quire.cache.prefix.retention_marks import RetentionMarks
from quire.config import CacheConfig
from quire.core.block_keys import BYTES_PER_TOKEN, BlockKeys, token_key
from quire.core.explanation import Miss, MissReason
from quire.core.request import Namespace

_MAX_EVICTIONS_LOGGED = 16384
_MOST_TENANTS = 4096
_MOST_NAMESPACES = 16  # per tenant


@dataclass(slots=True)
class Entry:
    """The blocks of one key, per group; ABSENT if the block was released or evicted."""

    key: bytes
    blocks: list[int]
    users: list[int]  # per group: number of tables that had the block when they last updated the index


@dataclass(slots=True)
class Chain(IndexHandle):
    """The keys of a table's indexed blocks."""

    keys: list[bytes]
    firsts: list[int]  # per group: index of the first entry that the table uses


@dataclass(frozen=True, slots=True)
class MatchedKeys(IndexHandle):
    """The keys of the blocks of a prefix match."""

    keys: list[bytes]


class HashIndex:
    """See PrefixIndex."""

    def __init__(self, config: CacheConfig, pools: Sequence[BlockPool], planned_writes: Collection[int]) -> None:
        """planned_writes: ignored, because no block is copied."""
        del planned_writes
        self.num_evicted = 0
        self.retention: RetentionMarks | None = None  # retention is ignored: it would have to mark whole chains
        self._config = config
        self._pools = pools
        self._block_keys = BlockKeys(config.block_size)
        self._windowed = config.dropping
        self._public = PublicPrefixes(config.public_prefixes, config.block_size * BYTES_PER_TOKEN)
        self._entries: dict[bytes, Entry] = {}
        self._unused: list[OrderedDict[bytes, Entry]] = [OrderedDict() for _ in pools]  # next to be evicted first
        self._chains: dict[BlockTable, Chain] = {}
        self._eviction_log: OrderedDict[bytes, EvictionCause] = OrderedDict()
        self._namespaces: OrderedDict[str, OrderedDict[Namespace, None]] = OrderedDict()  # by tenant, latest last

    # Matching

    def take_reason(self) -> EvictionReason:
        """No reason: the least recently used entry is evicted first."""
        return NO_REASON

    def match_prefix(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """See PrefixIndex."""
        data = token_key(tokens)
        num_public = self._public.num_blocks(namespace, data)
        keys: list[bytes] = []
        blocks: list[list[int]] = []
        nothing = [ABSENT] * len(self._pools)
        gaps = dict.fromkeys(self._windowed, -1)  # per group: the last index that has no block
        num_found = 0
        for key in self._keys(namespace, data, num_public):
            entry = self._entries.get(key)
            if entry is None and len(gaps) < len(nothing):
                break  # a group without a window lacks this block
            keys.append(key)
            blocks.append(nothing if entry is None else entry.blocks)
            for group in gaps:
                if blocks[-1][group] == ABSENT:
                    gaps[group] = len(keys) - 1
            position = len(keys) * self._config.block_size
            if all(gap < self._config.first_attended_block(group, position) for group, gap in gaps.items()):
                num_found = len(keys)
        found = tuple([some[group] for some in blocks[:num_found]] for group in range(len(nothing)))
        return PrefixMatch(found, num_found * self._config.block_size, (), num_public, MatchedKeys(keys[:num_found]))

    def truncate(self, match: PrefixMatch, num_tokens: int) -> PrefixMatch | None:
        """See PrefixIndex. None within a block, because no block is copied."""
        depth, rest = divmod(num_tokens, self._config.block_size)
        blocks = tuple(some[:depth] for some in match.blocks)
        starts = {group: self._config.first_attended_block(group, num_tokens) for group in self._windowed}
        if rest or any(ABSENT in blocks[group][start:] for group, start in starts.items()):
            return None
        return PrefixMatch(blocks, num_tokens, (), match.num_public, MatchedKeys(_keys_of(match)[:depth]))

    def explain_miss(self, namespace: Namespace, tokens: Sequence[int], found: PrefixMatch, reusable: int) -> Miss:
        """See PrefixIndex. A miss of less than a block gets the reason "last_token" or "recomputed"."""
        position = found.num_tokens
        token = tokens[position]
        if position // self._config.block_size >= reusable // self._config.block_size:
            return Miss(position, token, "last_token" if reusable == len(tokens) - 1 else "recomputed")
        rest = tokens[position : position + self._config.block_size]
        keys = _keys_of(found)
        key = next(self._keys(namespace, token_key(rest), found.num_public, keys))
        cause = self._eviction_log.get(key)
        if cause is not None:
            return Miss(position, token, "evicted", cause.now, cause.request_shown_to(namespace.tenant))
        if self._is_being_computed(namespace, rest, found):
            return Miss(position, token, "being_computed")
        return Miss(position, token, self._miss_reason(namespace, tokens[: position + self._config.block_size]))

    def _miss_reason(self, namespace: Namespace, tokens: Sequence[int]) -> MissReason:
        """The reason of a miss of tokens that were not evicted, of which the last block is missing."""
        for other in reversed(self._namespaces.get(namespace.tenant, ())):
            if other != namespace and self.match_prefix(other, tokens).num_tokens == len(tokens):
                return "other_salt" if other.salt != namespace.salt else "other_adapter"
        return "never_seen"

    def _is_being_computed(self, namespace: Namespace, rest: Sequence[int], found: PrefixMatch) -> bool:
        """Whether a running sequence has the tokens `rest` next behind the match."""
        keys = _keys_of(found)
        depth, wanted = len(keys), token_key(rest)
        for table, chain in self._chains.items():
            if len(chain.keys) < depth or chain.keys[depth - 1 : depth] != keys[-1:]:
                continue
            is_readable = self._root_of(table.namespace, depth, found) == self._root_of(namespace, depth, found)
            if is_readable and token_key(table.tokens[found.num_tokens : found.num_tokens + len(rest)]) == wanted:
                return True
        return False

    def _root_of(self, namespace: Namespace, index: int, found: PrefixMatch) -> Namespace:
        """The namespace under whose root a request of `namespace` with this match has its block `index`."""
        num_model, size = namespace.num_model_blocks(self._config.block_size), self._config.block_size
        if index < found.num_public and (index < num_model or not namespace.adapter_start):
            return self._public.root_key(namespace)[0]
        return namespace.of_block(index, size)

    def _keys(self, namespace: Namespace, data: bytes, num_public: int, known: Sequence[bytes] = ()) -> Iterator[bytes]:
        """Keys of the whole blocks of `data`. known: keys of the blocks before them."""
        public = None if known else self._public.root_key(namespace)[0]
        return self._block_keys.chain(data, namespace, public=public, num_public=num_public, known=known)

    # Insertion

    def register(self, table: BlockTable, found: PrefixMatch) -> None:
        """See PrefixIndex."""
        keys = _keys_of(found)
        table.cursor.num_public = found.num_public
        self._new_chain(table, keys)
        self._record_namespace(table.namespace)

    def register_fork(self, parent: BlockTable, child: BlockTable, num_indexed: int) -> None:
        """See PrefixIndex."""
        child.cursor.num_public = min(parent.cursor.num_public, num_indexed)
        self._new_chain(child, _chain_of(parent).keys[:num_indexed])

    def extend(self, table: BlockTable) -> bool:
        """See PrefixIndex. False: a chain has no fast path."""
        del table
        return False

    def insert(self, table: BlockTable, num_blocks: int, num_written: int) -> InsertResult:
        """See PrefixIndex."""
        added, chain = InsertResult(), _chain_of(table)
        self._update_windows(table, chain)
        for key in self._next_keys(table, chain, num_blocks):
            index, entry = len(chain.keys), self._entries.get(key)
            if entry is None:
                self._insert_entry(table, index, key, added)
            elif not self._exchange(table, index, entry, num_written // self._config.block_size, added):
                break
            self._extend(chain, key)
        table.cursor.num_indexed = len(chain.keys)
        return added

    def unregister(self, table: BlockTable, num_tokens: int) -> list[int]:
        """See PrefixIndex."""
        added, chain = InsertResult(), _chain_of(table)
        self._update_windows(table, chain)
        for key in self._next_keys(table, chain, num_tokens // self._config.block_size):
            if key not in self._entries:
                self._insert_entry(table, len(chain.keys), key, added)
            self._extend(chain, key)
        self._shorten(chain, 0)
        del self._chains[table]
        table.cursor.handle = None
        return added.entered

    def _new_chain(self, table: BlockTable, keys: Iterable[bytes]) -> None:
        chain = table.cursor.handle = self._chains[table] = Chain([], list(table.firsts))
        for key in keys:
            self._extend(chain, key)
        table.cursor.num_indexed = len(chain.keys)

    def _next_keys(self, table: BlockTable, chain: Chain, num_blocks: int) -> Iterator[bytes]:
        """Keys of a table's blocks up to `num_blocks`, behind its chain."""
        size, first = self._config.block_size, len(chain.keys)
        if first <= table.cursor.num_public:  # its new tokens may extend the match with a public prefix
            whole = token_key(table.tokens[: num_blocks * size])
            num_public = self._public.num_blocks(table.namespace, whole)
            table.cursor.num_public = max(table.cursor.num_public, num_public)
        data = token_key(table.tokens[first * size : num_blocks * size])
        return self._keys(table.namespace, data, table.cursor.num_public, chain.keys)

    def _insert_entry(self, table: BlockTable, index: int, key: bytes, added: InsertResult) -> None:
        """Insert a table's block as an entry, unless the windows of all groups have passed it."""
        blocks = [some[index] for some in table.blocks]
        if all(block == ABSENT for block in blocks):
            return
        for pool, block in zip(self._pools, blocks, strict=True):
            if block != ABSENT:
                pool.enter_index(block)
        self._entries[key] = Entry(key, blocks, [0] * len(blocks))
        self._eviction_log.pop(key, None)
        added.entered.append(index)

    def _exchange(
        self, table: BlockTable, index: int, entry: Entry, num_exchangeable: int, added: InsertResult
    ) -> bool:
        """Replace the table's blocks by those of an entry. Returns False if the table's blocks are still to be written.

        Blocks that the entry lacks are taken from the table. The index then counts as entered, because these blocks
        must leave the index if a step in flight fails.
        """
        own = [some[index] for some in table.blocks]
        if own == entry.blocks:
            return True
        if index >= num_exchangeable:
            return False
        filled = False
        for group, (mine, other) in enumerate(zip(own, entry.blocks, strict=True)):
            if mine in (other, ABSENT):
                continue
            if other == ABSENT:
                self._pools[group].enter_index(mine)
                entry.blocks[group], filled = mine, True
                continue
            self._pools[group].incr_ref(other)
            table.blocks[group][index] = other
            added.exchanged.append((group, mine))
            if added.changed_from is None:
                added.changed_from = index
        if filled:
            added.entered.append(index)
        return True

    # Use counts

    def _extend(self, chain: Chain, key: bytes) -> None:
        """Append a key to a chain."""
        entry = self._entries.get(key)
        if entry is not None:
            for group, first in enumerate(chain.firsts):
                if len(chain.keys) >= first:
                    entry.users[group] += 1
                    self._unused[group].pop(key, None)
        chain.keys.append(key)

    def _shorten(self, chain: Chain, length: int) -> None:
        """Remove keys from the end of a chain until it has `length` keys."""
        while len(chain.keys) > length:
            entry = self._entries.get(chain.keys.pop())
            if entry is not None:
                for group, first in enumerate(chain.firsts):
                    if len(chain.keys) >= first:
                        self._decr_users(entry, group)

    def _update_windows(self, table: BlockTable, chain: Chain) -> None:
        """Update the entries that the windows of a table have passed since the last call."""
        for group in self._windowed:
            first, seen = chain.firsts[group], table.firsts[group]
            chain.firsts[group] = max(first, seen)
            for key in chain.keys[first:seen]:
                entry = self._entries.get(key)
                if entry is not None:
                    self._decr_users(entry, group)

    def _decr_users(self, entry: Entry, group: int) -> None:
        entry.users[group] -= 1
        if not entry.users[group] and entry.blocks[group] != ABSENT:
            self._unused[group][entry.key] = entry

    # Eviction

    def evict(self, group: int, count: int, cause: EvictionCause) -> int:
        """See PrefixIndex."""
        victims = self._victims(group, count)
        if len(victims) < count and group in self._windowed:
            for table, chain in self._chains.items():
                self._update_windows(table, chain)
            victims = self._victims(group, count)
        for entry in victims:
            self._eviction_log[entry.key] = cause
            self._eviction_log.move_to_end(entry.key)
            self._release_blocks(entry, [group] if group in self._windowed else range(len(self._pools)))
        while len(self._eviction_log) > _MAX_EVICTIONS_LOGGED:
            self._eviction_log.popitem(last=False)
        self.num_evicted += len(victims)
        return len(victims)

    def invalidate(self, blocks: Collection[int], tables: Iterable[BlockTable]) -> None:
        """See PrefixIndex. An entry behind one that leaves stays if its own block was written."""
        gone = {key: one for key, one in self._entries.items() if one.blocks[0] in blocks and one.blocks[0] != ABSENT}
        for table in tables:
            chain = _chain_of(table)
            index = next((i for i, key in enumerate(chain.keys) if key in gone), None)
            if index is None:
                continue
            self._shorten(chain, index)
            table.cursor.num_indexed = index
        for entry in gone.values():
            self._release_blocks(entry, range(len(self._pools)))

    def _victims(self, group: int, count: int) -> list[Entry]:
        """Unused entries with an idle block, least recently used first. Blocks of steps in flight are not idle."""
        is_idle = self._pools[group].is_idle
        return list(islice((one for one in self._unused[group].values() if is_idle(one.blocks[group])), count))

    def _release_blocks(self, entry: Entry, groups: Iterable[int]) -> None:
        """Release the blocks of an entry in these groups, and delete the entry if it has none left."""
        for group in groups:
            if entry.blocks[group] != ABSENT:
                self._pools[group].leave_index(entry.blocks[group])
                entry.blocks[group] = ABSENT
                self._unused[group].pop(entry.key, None)
        if all(block == ABSENT for block in entry.blocks):
            del self._entries[entry.key]

    def _record_namespace(self, namespace: Namespace) -> None:
        """Record the namespace of a table, for the reasons of misses only."""
        known = self._namespaces.setdefault(namespace.tenant, OrderedDict())
        known[namespace] = None
        known.move_to_end(namespace)
        self._namespaces.move_to_end(namespace.tenant)
        if len(known) > _MOST_NAMESPACES:
            known.popitem(last=False)
        if len(self._namespaces) > _MOST_TENANTS:
            self._namespaces.popitem(last=False)

    # Checks

    def owners(self, group: int) -> Counter[int]:
        """See PrefixIndex."""
        return Counter(entry.blocks[group] for entry in self._entries.values() if entry.blocks[group] != ABSENT)

    def is_registered(self, table: BlockTable) -> bool:
        """See PrefixIndex."""
        return table in self._chains

    def check(self) -> list[str]:
        """See PrefixIndex."""
        users: Counter[tuple[bytes, int]] = Counter()
        wrong = []
        for table, chain in self._chains.items():
            if table.cursor.handle is not chain or table.cursor.num_indexed != len(chain.keys):
                wrong.append(f"a table of {table.cursor.num_indexed} indexed blocks has {len(chain.keys)} keys")
            for group, first in enumerate(chain.firsts):
                users.update((key, group) for key in chain.keys[first:])
                own = zip(chain.keys, table.blocks[group], strict=False)
                if any(block != ABSENT and not self._has_block(key, group, block) for key, block in own):
                    wrong.append(f"a table has indexed blocks of group {group} that are not the index's own")
        for key, entry in self._entries.items():
            wrong += [f"entry {key.hex()[:8]}: {fault}" for fault in self._entry_errors(entry, users)]
        lengths = [sum(key in unused for key in self._entries) for unused in self._unused]
        if lengths != [len(unused) for unused in self._unused]:
            wrong.append("the eviction queue has entries that are not in the index")
        return wrong

    def _has_block(self, key: bytes, group: int, block: int) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.blocks[group] == block

    def _entry_errors(self, entry: Entry, users: Counter[tuple[bytes, int]]) -> Iterator[str]:
        if all(block == ABSENT for block in entry.blocks):
            yield "it has no block"
        for group, (block, count) in enumerate(zip(entry.blocks, entry.users, strict=True)):
            if count != users[entry.key, group]:
                yield f"group {group} is used by {users[entry.key, group]} tables, not {count}"
            if count and block == ABSENT:
                yield f"group {group} is used, but its block is absent"
            if (entry.key in self._unused[group]) != (block != ABSENT and not count):
                yield f"group {group} is in the eviction queue although it is used or absent, or is missing there"


def _chain_of(table: BlockTable) -> Chain:
    """The chain of a table, set by `register` or `register_fork`."""
    chain = table.cursor.handle
    assert isinstance(chain, Chain), "the table is registered"
    return chain


def _keys_of(match: PrefixMatch) -> list[bytes]:
    return match.handle.keys if isinstance(match.handle, MatchedKeys) else []

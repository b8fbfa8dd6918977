"""The protocol of a prefix index, which finds the blocks with the KV of a prompt's prefix.

Whole blocks of known tokens enter the index in the order of their positions, when a step that writes them is planned.
The index owns the first `num_indexed` blocks of a table: if it already has a block with the same tokens, the table
takes that block instead of its own, so that none is kept twice.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quire.cache.block_table import BlockTable, IndexHandle
from quire.cache.prefix.retention_marks import RetentionMarks
from quire.core.block_keys import BYTES_PER_TOKEN, token_key
from quire.core.explanation import Miss
from quire.core.request import Namespace


class PrefixMatch(NamedTuple):
    """The longest prefix match of a prompt."""

    blocks: tuple[list[int], ...] = ()  # per group: whole blocks, ABSENT before a window
    num_tokens: int = 0  # of the whole blocks and the partial block
    partial: tuple[int, ...] = ()  # per group: a block whose leading tokens match next; empty if there is none
    num_public: int = 0  # leading blocks of the prompt that are public, matched or not: see PublicPrefixes
    handle: IndexHandle | None = None  # where in the index the whole blocks end


NO_MATCH = PrefixMatch()


class EvictionCause(NamedTuple):
    """The time of an eviction and the request that needs the blocks."""

    now: float = 0.0
    request_id: str = ""
    tenant: str = ""

    def request_shown_to(self, tenant: str) -> str | None:
        """ID of the request, which only its own tenant is shown; None for another tenant."""
        return self.request_id if tenant == self.tenant else None


class EvictionReason(NamedTuple):
    """Why blocks were evicted: the figures of the first one's eviction key, and its tenant."""

    numbers: dict[str, float]  # see docs/eviction.md
    tenant: str | None  # None if unknown


NO_REASON = EvictionReason({}, None)


class EvictionRecord(NamedTuple):
    """Blocks that were evicted for one request."""

    cause: EvictionCause
    num_blocks: int
    reason: EvictionReason


@dataclass(slots=True)
class InsertResult:
    """Changes to the blocks that a table offered to the index."""

    entered: list[int] = field(default_factory=list)  # table indices of the blocks that entered the index
    exchanged: list[tuple[int, int]] = field(default_factory=list)  # (group, block) that the table exchanged
    changed_from: int | None = None  # first table index with another block


class PrefixIndex(Protocol):
    """A prefix index. Its methods never allocate blocks; they only add and drop references."""

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since the start."""

    def take_reason(self) -> EvictionReason:
        """The reason of the first eviction since the last call."""

    @property
    def retention(self) -> RetentionMarks | None:
        """Retention of the KV in the index; None if the index ignores retention."""

    def match_prefix(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """The longest prefix match of `tokens`. Changes nothing.

        Blocks that the planned step writes (`planned_writes` of InFlight) match as whole blocks, but the tokens that it
        writes are not copied from them.
        """

    def truncate(self, match: PrefixMatch, num_tokens: int) -> PrefixMatch | None:
        """The part of a match of its first `num_tokens` tokens; None if the index cannot provide it now."""

    def explain_miss(self, namespace: Namespace, tokens: Sequence[int], match: PrefixMatch, reusable: int) -> Miss:
        """Why the prefix match `match` of `tokens` ended, where the leading `reusable` tokens could have matched."""

    def register(self, table: BlockTable, match: PrefixMatch) -> None:
        """Register a table that begins with `match`. All blocks of `match` count as used now."""

    def register_fork(self, parent: BlockTable, child: BlockTable, num_indexed: int) -> None:
        """Register a table that begins with blocks of another one; the first `num_indexed` are in the index."""

    def extend(self, table: BlockTable) -> bool:
        """Insert the next whole block of a table, if that changes nothing for other tables: the fast path of `insert`.

        Returns False, without a change, if `insert` is needed.
        """

    def insert(self, table: BlockTable, num_blocks: int, num_written: int) -> InsertResult:
        """Insert or exchange the whole blocks of a table up to `num_blocks`. They hold known tokens.

        A block with positions from `num_written` on is still to be written and never exchanged: it and all blocks
        behind it stay for the next call. The caller drops the references that the table had to the exchanged blocks.
        """

    def unregister(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Unregister a table before its release, and insert what the index lacks of its first `num_tokens` tokens.

        Returns the table indices of the blocks that entered.
        """

    def evict(self, group: int, count: int, cause: EvictionCause) -> int:
        """Evict idle blocks in the order of the policy until `count` of a group are freed. Returns how many were."""

    def invalidate(self, blocks: Collection[int], tables: Iterable[BlockTable]) -> None:
        """These blocks of group 0 were never computed: they leave the index, with the blocks that depend on them."""

    def owners(self, group: int) -> Counter[int]:
        """References of the index: one per block."""

    def is_registered(self, table: BlockTable) -> bool:
        """Whether the index has the table registered at its cursor."""

    def check(self) -> list[str]:
        """Errors of the index's structure; empty if there are none."""


def common_prefix_len(left: bytes, right: bytes) -> int:
    """Length in tokens of the common prefix of two keys."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length // BYTES_PER_TOKEN
    different = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    return ((different & -different).bit_length() - 1) // (8 * BYTES_PER_TOKEN)


class NoIndex:
    """The PrefixIndex without prefix caching. It never has a block."""

    num_evicted = 0
    retention = None

    def take_reason(self) -> EvictionReason:
        """No reason: there are no evictions."""
        return NO_REASON

    def match_prefix(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """No match."""
        del namespace, tokens
        return NO_MATCH

    def truncate(self, match: PrefixMatch, num_tokens: int) -> PrefixMatch | None:
        """None: no match has a part."""
        del match, num_tokens
        return None

    def explain_miss(self, namespace: Namespace, tokens: Sequence[int], found: PrefixMatch, reusable: int) -> Miss:
        """The miss reason "off"."""
        del namespace, found, reusable
        return Miss(0, tokens[0], "off")

    def register(self, table: BlockTable, found: PrefixMatch) -> None:
        """Does nothing."""

    def register_fork(self, parent: BlockTable, child: BlockTable, num_indexed: int) -> None:
        """Does nothing."""

    def extend(self, table: BlockTable) -> bool:
        """False: there is nothing to extend."""
        del table
        return False

    def insert(self, table: BlockTable, num_blocks: int, num_written: int) -> InsertResult:
        """No block enters."""
        del table, num_blocks, num_written
        return InsertResult()

    def unregister(self, table: BlockTable, num_tokens: int) -> list[int]:
        """No block enters."""
        del table, num_tokens
        return []

    def evict(self, group: int, count: int, cause: EvictionCause) -> int:
        """0: there are no blocks."""
        del group, count, cause
        return 0

    def invalidate(self, blocks: Collection[int], tables: Iterable[BlockTable]) -> None:
        """Does nothing."""

    def owners(self, group: int) -> Counter[int]:
        """No references."""
        del group
        return Counter()

    def is_registered(self, table: BlockTable) -> bool:
        """True for every table."""
        del table
        return True

    def check(self) -> list[str]:
        """No errors."""
        return []


_TENANT = "\0public"  # no credential maps to this tenant


class PublicPrefixes:
    """The public prefixes. The leading whole blocks of a prompt that match one of them are public.

    Of a prompt with an adapter that starts behind position 0, only blocks before that start are. They are the blocks
    of the model alone.
    """

    def __init__(self, prefixes: Sequence[Sequence[int]], block_bytes: int) -> None:
        """block_bytes: bytes of a block's key."""
        self.longest = max(map(len, prefixes), default=0)  # tokens; 0 without public prefixes
        self._prefixes = [token_key(prefix) for prefix in prefixes]
        self._size = block_bytes

    def num_blocks(self, namespace: Namespace, prompt: bytes) -> int:
        """Leading blocks of a prompt that are public."""
        number = max(
            (common_prefix_len(prefix, prompt) * BYTES_PER_TOKEN // self._size for prefix in self._prefixes), default=0
        )
        if number and namespace.adapter_start:
            return min(number, namespace.num_model_blocks(self._size // BYTES_PER_TOKEN))
        return number

    def root_key(self, namespace: Namespace) -> tuple[Namespace, bytes]:
        """The key of the public root: one for each kind of kernels and each adapter that starts at position 0."""
        adapter = "" if namespace.adapter_start else namespace.adapter
        return Namespace(_TENANT, "", adapter, namespace.deterministic), b""

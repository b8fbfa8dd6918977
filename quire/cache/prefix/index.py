"""What a prefix index is: it says which blocks hold the KV of a prompt's beginning, and owns those it knows.

Whole blocks of known tokens enter it in the order of their positions, as soon as a step that writes them is
planned. A table's leading `num_indexed` blocks are always the index's own: where the index has a block
with the same tokens already, the table takes it in place of its own, so that none is kept twice.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from struct import pack
from typing import NamedTuple, Protocol

from quire.cache.block_table import BlockTable
from quire.cache.prefix.retention_marks import Wishes
from quire.core.explanation import Miss
from quire.core.request import Namespace

SYMBOL = 8  # bytes of a token in keys: 64 bit, so that content that is not text can enter by its hash


class Found(NamedTuple):
    """The longest prefix of a prompt that the index has."""

    blocks: tuple[list[int], ...] = ()  # per group: whole blocks, ABSENT where a window has passed
    num_tokens: int = 0  # of whole blocks and of the partial one
    partial: tuple[int, ...] = ()  # per group: a block whose leading tokens go on; empty where none does
    num_public: int = 0  # leading blocks of the prompt that belong to a public prefix, found or not
    place: object = None  # where in the index the whole blocks end


NOTHING_FOUND = Found()


class Cause(NamedTuple):
    """When blocks are evicted, and for whom."""

    now: float = 0.0
    request_id: str = ""
    tenant: str = ""


class Reason(NamedTuple):
    """Why blocks were evicted: of the first of them, what the order goes by, and whose it was."""

    numbers: dict[str, float]  # see docs/eviction.md
    tenant: str | None  # None where it is not known


NO_REASON = Reason({}, None)


class GivenUp(NamedTuple):
    """Blocks that were evicted for somebody."""

    cause: Cause
    num_blocks: int
    reason: Reason


@dataclass(slots=True)
class Added:
    """What became of blocks that a table offered."""

    entered: list[int] = field(default_factory=list)  # table indices of the blocks that the index took in
    let_go: list[tuple[int, int]] = field(default_factory=list)  # (group, block) that the table gave up in exchange
    changed_from: int | None = None  # first index at which the table has another block now


class PrefixIndex(Protocol):
    """The verbs of an index. None of them takes blocks from the pools; they only own and let go."""

    @property
    def num_evicted(self) -> int:
        """Blocks, since the start."""

    def take_reason(self) -> Reason:
        """Why the first one went of all that was evicted since the last call."""

    @property
    def wishes(self) -> Wishes | None:
        """What requests asked for the KV that they left; None where the index does not heed that."""

    def find(self, namespace: Namespace, tokens: Sequence[int]) -> Found:
        """The longest prefix of `tokens` that can be had. Changes nothing.

        Blocks that are `fresh` (see InFlight) are found whole, but what the step writes is not copied from them.
        """

    def why(self, namespace: Namespace, tokens: Sequence[int], found: Found, reusable: int) -> Miss:
        """Why reuse of `tokens` ended where `found` says, when the leading `reusable` were asked for."""

    def enter(self, table: BlockTable, found: Found) -> None:
        """A table begins with what was found: all of it counts as used now."""

    def follow(self, parent: BlockTable, child: BlockTable) -> None:
        """A table begins with blocks of another one; `child.num_indexed` of them are the index's."""

    def add(self, table: BlockTable, num_blocks: int, num_written: int) -> Added:
        """Blocks of a table up to `num_blocks` hold known tokens: take them in, or exchange them.

        A block that is still to be written, from position `num_written` on, is never exchanged: it, and all behind
        it, waits for the next call. The caller gives back the references to what the table let go of.
        """

    def leave(self, table: BlockTable, num_tokens: int) -> list[int]:
        """A table is given up, of which `num_tokens` are valid: take in what is missing of them.

        Returns the table indices of the blocks that entered.
        """

    def evict(self, group: int, count: int, cause: Cause) -> int:
        """Let go of idle blocks, the least recently used first, until `count` of a group are freed; how many were."""

    def void(self, blocks: Collection[int], tables: Iterable[BlockTable]) -> None:
        """What these blocks of group 0 hold was never computed: they leave, with all that was computed from them."""

    def owners(self, group: int) -> Counter[int]:
        """References that the index holds, per block: one each."""

    def knows(self, table: BlockTable) -> bool:
        """Whether a table that entered is where it says that it is."""

    def check(self) -> list[str]:
        """Complaints about the index's own order; empty when all is well."""


def symbols(tokens: Sequence[int]) -> bytes:
    """Tokens as keys: bytes that are equal, or begin alike, where the tokens do."""
    return pack(f"{len(tokens)}q", *tokens)


def num_common(left: bytes, right: bytes) -> int:
    """Leading tokens that two keys have in common."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length // SYMBOL
    different = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    return ((different & -different).bit_length() - 1) // (8 * SYMBOL)


class NoIndex:
    """See PrefixIndex."""

    num_evicted = 0
    wishes = None

    def take_reason(self) -> Reason:
        """Nothing is evicted."""
        return NO_REASON

    def find(self, namespace: Namespace, tokens: Sequence[int]) -> Found:
        """Nothing."""
        del namespace, tokens
        return NOTHING_FOUND

    def why(self, namespace: Namespace, tokens: Sequence[int], found: Found, reusable: int) -> Miss:
        """Because nothing is kept."""
        del namespace, found, reusable
        return Miss(0, tokens[0], "off")

    def enter(self, table: BlockTable, found: Found) -> None:
        """Nothing to do."""

    def follow(self, parent: BlockTable, child: BlockTable) -> None:
        """Nothing to do."""

    def add(self, table: BlockTable, num_blocks: int, num_written: int) -> Added:
        """Nothing is taken in."""
        del table, num_blocks, num_written
        return Added()

    def leave(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Nothing is taken in."""
        del table, num_tokens
        return []

    def evict(self, group: int, count: int, cause: Cause) -> int:
        """There is nothing."""
        del group, count, cause
        return 0

    def void(self, blocks: Collection[int], tables: Iterable[BlockTable]) -> None:
        """There is nothing."""

    def owners(self, group: int) -> Counter[int]:
        """None."""
        del group
        return Counter()

    def knows(self, table: BlockTable) -> bool:
        """Nothing is known, and nothing need be."""
        del table
        return True

    def check(self) -> list[str]:
        """Nothing can be wrong."""
        return []


_TENANT = "\0public"  # no credential leads to it


class PublicPrefixes:
    """A prompt's leading whole blocks are public as far as it agrees with one of the prefixes."""

    def __init__(self, prefixes: Sequence[Sequence[int]], block_bytes: int) -> None:
        """block_bytes: of a block's key."""
        self.longest = max(map(len, prefixes), default=0)  # tokens; 0: there are none
        self._prefixes = [symbols(prefix) for prefix in prefixes]
        self._size = block_bytes

    def num_blocks(self, prompt: bytes) -> int:
        """Leading blocks that hold nothing but a public prefix."""
        return max((num_common(prefix, prompt) * SYMBOL // self._size for prefix in self._prefixes), default=0)

    def root_key(self, namespace: Namespace) -> tuple[Namespace, bytes]:
        """Where their KV is kept: one place for each adapter and kind of kernels."""
        return Namespace(_TENANT, "", namespace.adapter, namespace.deterministic), b""

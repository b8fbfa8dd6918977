"""The prefix index that keeps nothing: every prompt is computed."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from quire.cache.block_table import BlockTable
from quire.cache.prefix.index import NO_REASON, NOTHING_FOUND, Added, Cause, Found, Reason
from quire.core.explanation import Miss
from quire.core.request import Namespace


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

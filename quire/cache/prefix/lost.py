"""What was evicted: for whom and when, as far as it is remembered. For explanations only; nothing is decided by it."""

from collections import OrderedDict
from typing import NamedTuple

from quire.cache.prefix.index import Cause, num_common

MOST_PLACES = 4096
MOST_AT_A_PLACE = 8


class LostBlock(NamedTuple):
    """The first block that was given up at some place."""

    key: bytes  # its tokens
    cause: Cause


class Lost:
    """The latest evictions, by what came before the first block that was lost: a place, and the tokens before it."""

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[object, int], list[LostBlock]] = OrderedDict()

    def note(self, place: object, before: bytes, key: bytes, cause: Cause) -> None:
        """The block `key` was evicted."""
        known = (place, hash(before))
        lost = self._places.setdefault(known, [])
        lost.append(LostBlock(key, cause))
        del lost[:-MOST_AT_A_PLACE]
        self._places.move_to_end(known)
        if len(self._places) > MOST_PLACES:
            self._places.popitem(last=False)

    def find(self, place: object, before: bytes, rest: bytes, num_found: int) -> Cause | None:
        """Why more than `num_found` tokens of `rest`, are not there."""
        lost = self._places.get((place, hash(before)), ())
        return next((one.cause for one in reversed(lost) if num_common(one.key, rest) > num_found), None)

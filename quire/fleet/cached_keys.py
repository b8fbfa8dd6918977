"""Which replicas have which blocks in their prefix cache."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from quire.cache.key_report import KeyChanges
from quire.core.block_keys import state_key

MOST_KEYS = 550_000  # of about 64 MB
_NOTHING: Mapping[bytes, int] = MappingProxyType({})


class CachedKeys:
    """The replicas of each key. Exact as long as there are at most `most` keys.

    Beyond that, those are forgotten that were reported or asked for longest ago. Snapshots of recurrent states have
    keys of their own, see `state_key`.
    """

    def __init__(self, num_replicas: int, most: int = MOST_KEYS, *, has_states: bool = False) -> None:
        """has_states: whether a sequence continues only behind a snapshot of recurrent states."""
        self._num_replicas = num_replicas
        self._has_states = has_states
        self._most = most
        self._owners: dict[
            bytes, int
        ] = {}  # key -> a bit for each replica that has the block, reported longest ago first

    def __len__(self) -> int:
        return len(self._owners)

    def update(self, replica: int, changes: KeyChanges) -> None:
        """A replica has reported changes."""
        owners, bit = self._owners, 1 << replica
        for key in changes.removed:
            rest = owners.get(key, 0) & ~bit
            if rest:
                owners[key] = rest
            else:
                owners.pop(key, None)
        for key in changes.added:
            owners[key] = owners.pop(key, 0) | bit  # the latest last
        while len(owners) > self._most:
            del owners[next(iter(owners))]

    def forget(self, replica: int) -> None:
        """A replica has lost its cache."""
        bit = 1 << replica
        kept = ((key, owners & ~bit) for key, owners in self._owners.items())
        self._owners = {key: rest for key, rest in kept if rest}

    def of(self, replica: int) -> set[bytes]:
        """The keys of a replica."""
        return {key for key, owners in self._owners.items() if owners >> replica & 1}

    def num_blocks(self, keys: Iterable[bytes], expected: Mapping[bytes, int]) -> list[int]:
        """How many leading blocks of a prompt each replica has or will have, up to a snapshot if there are states.

        keys: those of its blocks, asked for as needed. expected: of keys, a bit for each replica that will have the
        block.
        """
        found, depth = [0] * self._num_replicas, 0
        asked = []
        alive = (1 << self._num_replicas) - 1
        for key in keys:
            have = alive & (self._owners.get(key, 0) | expected.get(key, 0))
            if have != alive:
                if not self._has_states:
                    self._end(found, alive ^ have, depth)
                alive = have
                if not alive:
                    break
            asked.append(key)
            depth += 1
            if self._has_states:
                state = state_key(key)
                asked.append(state)
                self._end(found, alive & (self._owners.get(state, 0) | expected.get(state, 0)), depth)
        if not self._has_states:
            self._end(found, alive, depth)
        if len(self._owners) > self._most // 2:
            self._keep(asked)
        return found

    def num_cached(self, replica: int, keys: Iterable[bytes], expected: Mapping[bytes, int] = _NOTHING) -> int:
        """How many leading blocks of a prompt a replica has or will have, with or without snapshots."""
        owners, bit, number = self._owners, 1 << replica, 0
        for key in keys:
            if not (owners.get(key, 0) | expected.get(key, 0)) & bit:
                break
            number += 1
        return number

    def _keep(self, keys: Sequence[bytes]) -> None:
        """Make keys the last to be forgotten, and among them the first blocks the very last."""
        for key in reversed(keys):
            if key in self._owners:
                self._owners[key] = self._owners.pop(key)

    def _end(self, found: list[int], ended: int, depth: int) -> None:
        """The matches of replicas end behind `depth` blocks."""
        for replica in range(self._num_replicas):
            if ended >> replica & 1:
                found[replica] = depth

"""Crash bisection and the denylist.

A request is a suspect after two crashes in steps that computed it, without progress in between. Suspects then run in
groups, one group after the other, while all other requests are held. If the engine crashes again, the suspects of that
step are split into smaller groups. A request that passes its position of the crash is cleared. A request is found
guilty after `MAX_CRASHES_ALONE` crashes in a row, without progress, in which it was alone in the step. Random kills of
the process meet this condition only if no engine lives for as long as one step.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256

import msgspec

from quire.core import codec
from quire.core.request import Request

MAX_CRASHES_ALONE = 3  # crashes
_SUSPECT_CRASHES = 2  # crashes that make a request a suspect
_NUM_PARTS = 8  # parts of a split: an innocent group costs one or two steps, a guilty one costs an engine start


class Crashes:
    """The crashes of each request without progress in between, whichever replicas it ran on."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}  # request id -> position that was being computed at the crash
        self.counts: dict[str, int] = {}  # request id -> crashes
        self.counts_alone: dict[str, int] = {}  # request id -> crashes in which it was alone

    def forget(self, name: str) -> None:
        """Remove a request that has ended or is cleared."""
        for notes in (self.positions, self.counts, self.counts_alone):
            notes.pop(name, None)


class CrashBisection:
    """State of the crash bisection of one replica: from crashes and progress it derives which requests may run.

    crashes: of the fleet.
    """

    def __init__(self, crashes: Crashes) -> None:
        self._crashes = crashes
        self._groups: list[list[str]] = []  # groups to try; the first one runs

    @property
    def has_suspects(self) -> bool:
        """Whether `record_progress` or `forget` may change anything."""
        return bool(self._crashes.positions or self._groups)

    @property
    def suspects(self) -> set[str]:
        """Ids of the requests that are tried in groups."""
        return {name for group in self._groups for name in group}

    @property
    def current_group(self) -> tuple[str, ...] | None:
        """Ids of the requests that may run during a bisection; None if all may run."""
        return tuple(self._groups[0]) if self._groups else None

    def record_crash(self, rows: Mapping[str, int], num_ended: int = 0) -> str | None:
        """Record a crash. rows: requests of the uncommitted steps -> the last position that was to be computed.

        num_ended: number of other requests in these steps that have ended since, and may be the cause.
        Returns the id of the guilty request if it is certain, and forgets it; else None.
        """
        crashes = self._crashes
        for name, position in rows.items():
            crashes.positions[name] = max(position, crashes.positions.get(name, 0))
            crashes.counts[name] = crashes.counts.get(name, 0) + 1
        tried = self._groups[0] if self._groups else []
        hit = [name for name in rows if crashes.counts[name] >= _SUSPECT_CRASHES]
        if not hit:
            return None
        if len(rows) + num_ended == 1:
            (name,) = hit
            crashes.counts_alone[name] = crashes.counts_alone.get(name, 0) + 1
            if crashes.counts_alone[name] >= MAX_CRASHES_ALONE:
                self.forget(name)
                return name
        spared = [name for name in tried if name not in rows]
        rest = [[name for name in group if name not in rows] for group in self._groups[1:]]
        self._groups = [group for group in (*_parts(hit), spared, *rest) if group]
        return None

    def record_progress(self, name: str, position: int) -> bool:
        """Record that a step was committed which computed a request up to `position`.

        Clears it if that is progress after a crash. Returns whether it did.
        """
        is_cleared = name in self._crashes.positions and position >= self._crashes.positions[name]
        if is_cleared:
            self.forget(name)
        return is_cleared

    def forget(self, name: str) -> None:
        """Remove a request that has ended or is cleared."""
        self._crashes.forget(name)
        remaining = ([one for one in group if one != name] for group in self._groups)
        self._groups = [group for group in remaining if group]


def _parts(names: Iterable[str]) -> list[list[str]]:
    names = list(names)
    size = -(-len(names) // _NUM_PARTS)
    return [names[i : i + size] for i in range(0, len(names), size)]


_MAX_ENTRIES = 256  # entries of the denylist; the oldest are dropped


class Denylist:
    """The denylist: content of requests that crashed the engine, compared without id, seed and delivered tokens."""

    def __init__(self) -> None:
        self._contents: dict[bytes, None] = {}

    def __contains__(self, request: Request) -> bool:
        return bool(self._contents) and _content(request) in self._contents

    def add(self, request: Request) -> None:
        """Add the content of a request."""
        self._contents[_content(request)] = None
        if len(self._contents) > _MAX_ENTRIES:
            del self._contents[next(iter(self._contents))]


def _content(request: Request) -> bytes:
    """SHA-256 of a request without its id, seed, known tokens and what else an earlier engine leaves in it."""
    params = request.params.changed(seed=None)
    content = msgspec.structs.replace(request, id="", params=params, known_outputs=(), resumed=False, waited=0.0)
    return sha256(codec.encode(content)).digest()

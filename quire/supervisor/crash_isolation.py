"""Suspects: which request ends the engine, if any does. Knows names and positions, no processes and no time.

A request is a suspect once the engine died twice in steps that it was part of, and it never came further in between.
Suspects are then tried in groups, one group after the other, while everybody else is held. A group with which the
engine dies is split; one that passes the place where it died is cleared, and goes on. Only who was alone in the step,
`ALONE` times in a row without coming further, is to blame: a process that is killed at random, however often, meets
somebody who is alone and comes no further that many times only if it never runs for as long as one step.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256

from quire.core import codec
from quire.engine.inputs import NewRequest

ALONE = 3  # deaths
_TOGETHER = 2  # deaths that make a suspect
_PARTS = 8  # that a group is split into: one that is innocent costs a step or two, one that is not costs a start


class Suspects:
    """Told of deaths and of progress, it says who may run."""

    def __init__(self) -> None:
        self._marks: dict[str, int] = {}  # positions that were being computed when the engine died
        self._deaths: dict[str, int] = {}  # of the same, without coming further
        self._alone: dict[str, int] = {}
        self._groups: list[list[str]] = []  # to be tried; the first one runs

    @property
    def watching(self) -> bool:
        """Whether `survived` would change anything."""
        return bool(self._marks)

    @property
    def trying(self) -> tuple[str, ...] | None:
        """Those who run while suspects are tried; None when everybody may run."""
        return tuple(self._groups[0]) if self._groups else None

    def died(self, rows: Mapping[str, int], num_gone: int = 0) -> str | None:
        """The engine died in steps with these requests, each with the furthest position that was to be computed.

        num_gone: others of those steps, which have ended since: they may have been the reason. Who is to blame, if
        that is certain; it is then forgotten.
        """
        for name, position in rows.items():
            self._marks[name] = max(position, self._marks.get(name, 0))
            self._deaths[name] = self._deaths.get(name, 0) + 1
        tried = self._groups[0] if self._groups else []
        hit = [name for name in rows if self._deaths[name] >= _TOGETHER]
        if not hit:
            return None
        if len(rows) + num_gone == 1:
            (name,) = hit
            self._alone[name] = self._alone.get(name, 0) + 1
            if self._alone[name] >= ALONE:
                self.forget(name)
                return name
        spared = [name for name in tried if name not in rows]
        rest = [[name for name in group if name not in rows] for group in self._groups[1:]]
        self._groups = [group for group in (*_parts(hit), spared, *rest) if group]
        return None

    def survived(self, name: str, position: int) -> None:
        """A step was committed in which a request came to this position."""
        if name in self._marks and position >= self._marks[name]:
            self.forget(name)

    def forget(self, name: str) -> None:
        """A request has ended, or is cleared."""
        for notes in (self._marks, self._deaths, self._alone):
            notes.pop(name, None)
        remaining = ([one for one in group if one != name] for group in self._groups)
        self._groups = [group for group in remaining if group]


def _parts(names: Iterable[str]) -> list[list[str]]:
    names = list(names)
    size = -(-len(names) // _PARTS)
    return [names[i : i + size] for i in range(0, len(names), size)]


_REMEMBERED = 256  # the newest


class GivenUp:
    """What was asked by requests that are not tried again, whoever asks it."""

    def __init__(self) -> None:
        self._contents: dict[bytes, None] = {}

    def __contains__(self, request: NewRequest) -> bool:
        return bool(self._contents) and _content(request) in self._contents

    def add(self, request: NewRequest) -> None:
        """One more."""
        self._contents[_content(request)] = None
        if len(self._contents) > _REMEMBERED:
            del self._contents[next(iter(self._contents))]


def _content(request: NewRequest) -> bytes:
    """A digest of what is asked, and not of who asks, when, or what is known of the answer."""
    asked = request._replace(request_id="", params=request.params.changed(seed=None), known=(), resumed=False)
    return sha256(codec.encode(asked)).digest()

"""The updates of all steps of a journal, for a page that goes through them forwards and backwards.

A replay gives an update after each planned step. They are kept in segments that begin with a full one, compressed, up
to a number of steps and of bytes.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from quire.cache.prefix.radix_node import Node
from quire.core.block_keys import BYTES_PER_TOKEN
from quire.core.journal_file import JournalError
from quire.core.step import to_bytes
from quire.errors import QuireError
from quire.monitor.merging import Decoded, MergedUpdates
from quire.monitor.monitor import Load, Monitor
from quire.monitor.tree import MOST_TOKENS, path_tokens
from quire.monitor.update import NodeDetail, NodeRow, Update, Watcher
from quire.scheduler.journal import ReplayMismatch, read_records, replay_steps

MOST_STEPS = 20_000
MOST_BYTES = 2**28  # of compressed updates
MOST_ANSWERED = 100  # steps in one answer
_MOST_ANSWERED_BYTES = 2**22
_MOST_NODE_BYTES = 2**27  # of tokens of nodes
_SEGMENT = 50  # steps
_VIEWER = 0
_EVERYTHING = Watcher("", sees_all=True)


class _NodeTokens(NamedTuple):
    """Tokens of a node from some step on. start: tokens of the path before the node. edge: of the first MOST_TOKENS."""

    first_step: int
    start: int
    edge: bytes


class NodeTokens:
    """Tokens of nodes at each step. A node that grows keeps its first tokens, so that the longest edge is enough."""

    def __init__(self) -> None:
        self._versions: dict[int, list[_NodeTokens]] = {}
        self._num_bytes = 0

    def add(self, step: int, node: Node) -> None:
        """Keep the tokens of a changed node, unless they are known or there are too many already."""
        versions = self._versions.setdefault(node.id, [])
        start, edge = path_tokens(node) - len(node.edge) // BYTES_PER_TOKEN, node.edge[: MOST_TOKENS * BYTES_PER_TOKEN]
        grows = bool(versions) and versions[-1].start == start and edge.startswith(versions[-1].edge)
        new = len(edge) - (len(versions[-1].edge) if grows else 0)
        if grows and not new:
            return
        if self._num_bytes + new > _MOST_NODE_BYTES:
            if not grows:  # the tokens of before are those of another place
                versions.append(_NodeTokens(step, start, b""))
            return
        self._num_bytes += new
        first_step = versions.pop().first_step if grows else step
        versions.append(_NodeTokens(first_step, start, edge))

    def detail(self, step: int, row: NodeRow) -> NodeDetail:
        """A node at a step; without tokens if they were not kept."""
        known = [one for one in self._versions.get(row.id, ()) if one.first_step <= step]
        start, edge = (known[-1].start, known[-1].edge) if known else (0, b"")
        tokens = np.frombuffer(edge, np.int64)[: row.num_tokens].tolist()
        return NodeDetail(row.id, tokens, start + row.num_tokens, row.hits, row.created_at, row.last_used_at)


class Recording:
    """Updates after steps 0, 1, 2 ... of a replay."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._segments: list[bytes] = []  # compressed
        self._open: list[bytes] = []  # updates of the last segment, which is not complete
        self._num_bytes = 0
        self._nodes = NodeTokens()
        self._cached: tuple[int, list[bytes]] = (-1, [])  # the segment read last

    @property
    def is_full(self) -> bool:
        """Whether no further step is kept."""
        return self.num_steps >= MOST_STEPS or self._num_bytes >= MOST_BYTES

    @property
    def begins_segment(self) -> bool:
        """Whether the next update has to be a full one."""
        return not self._open

    def add(self, update: Update, monitor: Monitor) -> None:
        """Keep the update after the next step. monitor: still in the state of the update."""
        for row in update.tree.nodes:
            node = monitor.shown_node(_VIEWER, row.id)
            assert node is not None, "the update shows it"
            self._nodes.add(self.num_steps, node)
        self.num_steps += 1
        self._open.append(msgspec.json.encode(update))
        if len(self._open) == _SEGMENT:
            self._segments.append(zlib.compress(b"\n".join(self._open), 1))
            self._num_bytes += len(self._segments[-1])
            self._open = []

    def steps(self, first: int, count: int) -> bytes:
        """JSON of at most `count` updates from step `first` on, of which the first is full. There may be fewer.

        Raises IndexError for a step that does not exist.
        """
        updates = [msgspec.json.encode(self._merged(first).full())]
        size = len(updates[0])
        for step in range(first + 1, min(first + min(count, MOST_ANSWERED), self.num_steps)):
            updates.append(self._update(step))
            size += len(updates[-1])
            if size > _MOST_ANSWERED_BYTES:
                break
        return b'{"num_steps":%d,"steps":[%s]}' % (self.num_steps, b",".join(updates))

    def node(self, step: int, number: int) -> NodeDetail | None:
        """A node after a step; None if it is not shown then. Raises IndexError for a step that does not exist."""
        row = self._merged(step).node(number)
        return None if row is None else self._nodes.detail(step, NodeRow(*row))

    def _merged(self, step: int) -> MergedUpdates:
        if not 0 <= step < self.num_steps:
            raise IndexError(step)
        first = step - step % _SEGMENT
        merged = MergedUpdates(_decode(self._update(first)))
        for one in range(first + 1, step + 1):
            merged.apply(_decode(self._update(one)))
        return merged

    def _update(self, step: int) -> bytes:
        number, place = divmod(step, _SEGMENT)
        if number == len(self._segments):
            return self._open[place]
        cached = self._cached
        if cached[0] != number:
            self._cached = cached = number, zlib.decompress(self._segments[number]).split(b"\n")
        return cached[1][place]


def _decode(update: bytes) -> Decoded:
    decoded: Decoded = msgspec.json.decode(update)
    return decoded


def record_file(path: Path, advance: Callable[[float, float], None]) -> tuple[Recording, str]:
    """Replay a journal. Returns its updates, and why they end early: empty if they do not.

    advance(done, total): called with bytes of the file. Raises JournalError, OSError.
    """
    with path.open("rb") as file:
        return _record(file, path.stat().st_size, advance)


def _record(file: BinaryIO, size: int, advance: Callable[[float, float], None]) -> tuple[Recording, str]:
    recording, monitors, num_seen = Recording(), list[Monitor](), 0
    replayed = replay_steps(read_records(file), on_begin=lambda scheduler: monitors.append(Monitor(scheduler, Load())))
    try:
        for scheduler, planned, recorded in replayed:
            if planned is None:
                continue
            if recording.is_full:
                return recording, f"the page shows the first {recording.num_steps:,} steps; the journal has more"
            if to_bytes(planned) != recorded:
                return recording, f"step {recording.num_steps} differs from the recorded one; the page ends before it"
            num_seen = 0 if recording.begins_segment else num_seen
            assert scheduler.step_log is not None and scheduler.step_log.newest is not None, "the monitor records steps"
            now = scheduler.step_log.newest.at
            recording.add(monitors[0].update(_VIEWER, _EVERYTHING, num_seen, now, now), monitors[0])
            num_seen += 1
            advance(file.tell(), size)
    except ReplayMismatch as error:
        return recording, f"the replay differs after step {recording.num_steps}: {error}"
    except QuireError:
        raise
    except Exception as error:  # records are untrusted, so they may cause any error
        raise JournalError(f"damaged after step {recording.num_steps}: {type(error).__name__}: {error}") from error
    advance(size, size)
    return recording, ""

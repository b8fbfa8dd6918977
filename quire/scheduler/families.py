"""Families: the n sequences of each request, of which one computes the prompt for all."""

from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Sequence


class Families:
    """Unfinished sequences by request.

    The first of a family queues; the others are held, in nobody's way, until the KV of what they share is there.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._members: dict[str, list[Sequence]] = {}
        self._held: dict[str, list[Sequence]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    def members(self, request_id: str) -> list[Sequence]:
        """Those that have not ended; none of an unknown request."""
        return list(self._members.get(request_id, ()))

    def add(self, request_id: str, sequences: list[Sequence]) -> list[Sequence]:
        """A request arrives: queue those that have to compute its prompt, which it returns, and hold the others."""
        self._members[request_id] = list(sequences)
        held_back = sequences[0].num_shared or sequences[0].request.beams
        num_first = 1 if held_back else len(sequences)
        for seq in sequences[:num_first]:
            self._queue.put(seq)
        if sequences[num_first:]:
            self._held[request_id] = sequences[num_first:]
        return sequences[:num_first]

    def hold(self, seq: Sequence) -> None:
        """One that has no part for now."""
        self._held.setdefault(seq.request.id, []).append(seq)

    def release(self, request_id: str) -> list[Sequence]:
        """Those that were held, and are no longer."""
        return [seq for seq in self._held.pop(request_id, ()) if not seq.finished] if self._held else []

    def donor(self, seq: Sequence) -> Sequence | None:
        """A relative that runs and has the KV of what they share."""
        if not seq.num_shared or seq.swapped:
            return None
        relatives = self._members[seq.request.id]
        return next((one for one in relatives if one.has_written(seq.num_shared)), None)

    def remove(self, seq: Sequence) -> Sequence | None:
        """A sequence has ended. If the others still waited for it, the next takes its part, and is returned."""
        request_id = seq.request.id
        relatives = self._members[request_id]
        relatives.remove(seq)
        if not relatives:
            del self._members[request_id]
        held = self.release(request_id)
        if not held:
            return None
        self._queue.put(held[0])
        if held[1:]:
            self._held[request_id] = held[1:]
        return held[0]

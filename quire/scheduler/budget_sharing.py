"""Shares: who gets the tokens that a step has left, and whose rows, where its policy knows tenants or classes.

Everybody that runs has one token of each step anyway. Without shares the earliest arrivals get all the others, so
that long prompts of one tenant hold up everybody else's for many steps; and whoever has a row keeps it. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from typing import NamedTuple

from quire.config import Policy
from quire.scheduler.queue.fair import PROMPT_WEIGHT, Fair
from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Sequence

Party = str | int  # a tenant, or a class


class Sharing(NamedTuple):
    """Whom a sequence belongs to, whose party comes first, and who gives way."""

    party: Callable[[Sequence], Party]
    place: Callable[[Queue, Party], int]  # less is first
    least: float  # share of an equal part that everybody gets, if it wants that much
    gives_way: Callable[[Listing[Sequence], Queue, Sequence], Sequence | None]  # of those who run, to the queue's head
    reason: str


def split(wanted: Mapping[Party, int], total: int, places: Mapping[Party, int], least: float) -> dict[Party, int]:
    """Everybody gets `least` of an equal part; of what is left, each gets what those before it leave."""
    part = int(total * least / len(wanted)) if wanted else 0
    shares = {party: min(count, part) for party, count in wanted.items()}
    left = total - sum(shares.values())
    for party in sorted(wanted, key=lambda party: places[party]):
        more = min(wanted[party] - shares[party], left)
        shares[party] += more
        left -= more
    return shares


def _tenant(seq: Sequence) -> Party:
    return seq.request.namespace.tenant


def _class(seq: Sequence) -> Party:
    return seq.rank[0]


def _worst_class(running: Listing[Sequence], _: Queue, head: Sequence) -> Sequence | None:
    """Who came last of the worst class, if that is worse than the head's."""
    return running[-1] if running and running[-1].rank[0] > head.rank[0] else None


def _most_rows(running: Listing[Sequence], head: Sequence) -> Sequence | None:
    """Who came last of the tenant that has most rows, with a family so small that the head's has no more rows then.

    A tenant that has none may take the rows of any family.
    """
    counts = Counter(map(_tenant, running))
    tenant, most = max(counts.items(), key=lambda one: one[1], default=("", 0))
    own = counts[_tenant(head)]
    if most <= own + 1:
        return None
    families = Counter(seq.request.id for seq in running)
    theirs = (seq for seq in reversed(running) if _tenant(seq) == tenant)
    return next((seq for seq in theirs if not own or most - families[seq.request.id] > own), None)


def _served_more(running: Listing[Sequence], queue: Queue, head: Sequence) -> Sequence | None:
    """Who came last of the tenant that was served most, if the head's will not have been more with the head's prompt.

    Its family is no larger than the head's. So a burst of a tenant that uses less than its share need not wait.
    """
    counters = {tenant: _served(queue, tenant) for tenant in map(_tenant, running)}
    tenant, most = max(counters.items(), key=lambda one: one[1], default=("", 0))
    if tenant == _tenant(head) or most < _served(queue, _tenant(head)) + PROMPT_WEIGHT * len(head.tokens):
        return None
    families = Counter(seq.request.id for seq in running)
    theirs = (seq for seq in reversed(running) if _tenant(seq) == tenant)
    return next((seq for seq in theirs if families[seq.request.id] <= head.request.num_sequences), None)


def _fair(running: Listing[Sequence], queue: Queue, head: Sequence) -> Sequence | None:
    return _most_rows(running, head) or _served_more(running, queue, head)


def _served(queue: Queue, party: Party) -> int:
    assert isinstance(queue, Fair), "who shares by tenant counts what each was served"
    return queue.counter(str(party))


SHARINGS: Mapping[Policy, Sharing] = {
    "fair": Sharing(_tenant, _served, 0.25, _fair, "a tenant that has fewer rows, or was served less, waits"),
    "priority": Sharing(_class, lambda _, of_class: int(of_class), 0.0, _worst_class, "a better class waits"),
}


class Shares:
    """What a step has left for those who run, beside one token for each, so that there is some for who waits first."""

    def __init__(self, sharing: Sharing, running: Iterable[Sequence], queue: Queue, total: int) -> None:
        """The queue has a head."""
        self._party = sharing.party
        head = queue.head
        assert head is not None, "somebody waits"
        wanted = {sharing.party(head): min(queue.num_tokens_before(head), total)}  # its own among them
        for seq in running:
            count = min(len(seq.tokens) + seq.num_pending, seq.limit) - seq.num_computed - 1
            if count > 0:
                party = sharing.party(seq)
                wanted[party] = wanted.get(party, 0) + count
        places = {party: sharing.place(queue, party) for party in wanted}
        self._left = split(wanted, total, places, sharing.least)

    def take(self, seq: Sequence, most: int) -> int:
        """Some of its party's tokens for a sequence that wants `most`."""
        party = self._party(seq)
        count = min(most, self._left.get(party, 0))
        self._left[party] = self._left.get(party, 0) - count
        return count

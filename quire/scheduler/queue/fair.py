"""Fairness between tenants: virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", 2024)."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice

from quire.scheduler.queue.fcfs import RankedQueue
from quire.scheduler.queue.waiting_queue import MOST_REPORTED, MOST_SERVICE, Queue
from quire.scheduler.sequence import Rank, Sequence
from quire.scheduler.step_builder import ScheduledChunk

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # service per computed prompt token, and per generated token
HeapEntry = tuple[int, int, Rank, str]  # counter, last turn, rank of the head, tenant
MOST_TENANTS = 4096  # whose counters are kept while none of their sequences waits


class FairQueue(Queue):
    """The tenant with the lowest counter is next; of equal ones, the tenant admitted longest ago; within it, by rank.

    An admission adds the prompt tokens outside the prefix match to the tenant's counter, and each generated token adds
    OUTPUT_WEIGHT. Recomputation after a preemption adds nothing. If a tenant without waiting sequences queues one, its
    counter is raised to the lowest counter of the waiting tenants, or of the tenant admitted last, less a credit.

    Service of other engines counts as if it was given here: it adds to the counter, which is raised first if no
    sequence of the tenant waits here, and the tenant counts as the one admitted last.
    """

    def __init__(self, credit: int = 0) -> None:
        """credit: by how much the counter of a returning tenant may stay below the others, in weighted tokens."""
        self._credit = credit
        self._by_tenant: dict[str, RankedQueue] = {}  # sequences of tenants that wait
        self._counters: OrderedDict[str, int] = OrderedDict()  # least recently updated first
        self._last_turns: dict[str, int] = {}  # number of the tenant's last admission
        self._num_turns = 0
        self._heap: list[
            HeapEntry
        ] = []  # at least one entry per waiting tenant; an entry may be too low, never too high
        self._last_admitted = ""  # the tenant admitted last, here or elsewhere
        self._unreported: dict[str, int] | None = None  # service given here; None: it is not reported
        self._length = 0

    @property
    def head(self) -> Sequence | None:
        """See Queue."""
        while self._heap:
            tenant = self._heap[0][-1]
            queue = self._by_tenant.get(tenant)
            if queue is None or queue.head is None:
                heappop(self._heap)
                continue
            place = self._heap_entry(tenant, queue.head)
            if place == self._heap[0]:
                return queue.head
            heapreplace(self._heap, place)
        return None

    def __len__(self) -> int:
        return self._length

    def __contains__(self, seq: Sequence) -> bool:
        queue = self._by_tenant.get(seq.request.namespace.tenant)
        return queue is not None and seq in queue

    def counter(self, tenant: str) -> int:
        """The counter of a tenant in weighted tokens; 0 for an unknown or forgotten one."""
        return self._counters.get(tenant, 0)

    def put(self, seq: Sequence) -> None:
        """See Queue."""
        tenant = seq.request.namespace.tenant
        queue = self._by_tenant.get(tenant)
        if queue is None:
            self._raise(tenant, self._least())
            queue = self._by_tenant[tenant] = RankedQueue()
        queue.put(seq)
        self._length += 1
        if queue.head is seq:
            self._push(tenant)

    def remove(self, seq: Sequence) -> None:
        """See Queue."""
        tenant = seq.request.namespace.tenant
        queue = self._by_tenant[tenant]
        queue.remove(seq)
        self._length -= 1
        if not queue.head:
            del self._by_tenant[tenant]
            self._drop_counters()

    def first(self, count: int) -> list[Sequence]:
        """See Queue."""
        head = self.head
        return [] if head is None else self._by_tenant[head.request.namespace.tenant].first(count)

    def num_tokens_before(self, seq: Sequence) -> int:
        """See Queue. Counts the tenant's own sequences only, because other tenants may come before or after it."""
        queue = self._by_tenant.get(seq.request.namespace.tenant)
        return 0 if queue is None else queue.num_tokens_before(seq)

    def admitted(self, seq: Sequence, num_new: int) -> None:
        """See Queue."""
        self._last_admitted = seq.request.namespace.tenant
        self._num_turns += 1
        self._last_turns[self._last_admitted] = self._num_turns
        self._serve(self._last_admitted, PROMPT_WEIGHT * num_new)

    def served(self, scheduled: Iterable[ScheduledChunk], counts: Iterable[int]) -> None:
        """See Queue."""
        generated: dict[str, int] = {}
        for chunk, count in zip(scheduled, counts, strict=True):
            tenant = chunk.seq.request.namespace.tenant
            generated[tenant] = generated.get(tenant, 0) + count
        for tenant, count in generated.items():
            self._serve(tenant, OUTPUT_WEIGHT * count)

    def served_elsewhere(self, service: Mapping[str, int]) -> None:
        """See Queue."""
        least = self._least()
        for tenant, tokens in service.items():
            if tenant not in self._by_tenant:
                self._raise(tenant, least)
            self._charge(tenant, tokens)
        if service:
            self._last_admitted = min(service, key=lambda tenant: (self.counter(tenant), tenant))

    def report_service(self) -> None:
        """See Queue."""
        self._unreported = {}

    def take_service(self) -> dict[str, int]:
        """See Queue. What is above MOST_REPORTED tenants and MOST_SERVICE waits for the next call."""
        unreported, taken = self._unreported or {}, {}
        for tenant in list(islice(unreported, MOST_REPORTED)):
            taken[tenant] = min(unreported[tenant], MOST_SERVICE)
            unreported[tenant] -= taken[tenant]
            if not unreported[tenant]:
                del unreported[tenant]
        return taken

    def _least(self) -> int:
        """The lowest counter of the waiting tenants, or that of the tenant admitted last."""
        return self.counter(self._last_admitted) if self.head is None else self._heap[0][0]

    def _raise(self, tenant: str, least: int) -> None:
        """Raise the counter of a tenant that begins to wait, here or elsewhere."""
        self._set_counter(tenant, max(self.counter(tenant), least - self._credit))

    def _serve(self, tenant: str, tokens: int) -> None:
        """Count service of this engine."""
        self._charge(tenant, tokens)
        if self._unreported is not None and tokens:
            self._unreported[tenant] = self._unreported.get(tenant, 0) + tokens

    def _charge(self, tenant: str, tokens: int) -> None:
        """Add to a counter. The heap entry is corrected when it reaches the top."""
        self._set_counter(tenant, self.counter(tenant) + tokens)

    def _set_counter(self, tenant: str, counter: int) -> None:
        self._counters[tenant] = counter
        self._counters.move_to_end(tenant)
        self._drop_counters()

    def _drop_counters(self) -> None:
        """Drop the least recently updated counters of tenants without waiting sequences, above MOST_TENANTS."""
        tries = 2  # more than the one tenant that a call adds, so that the dict shrinks again
        while len(self._counters) > MOST_TENANTS + len(self._by_tenant) and tries:
            tenant = next(iter(self._counters))
            if tenant in self._by_tenant:
                self._counters.move_to_end(tenant)
            else:
                del self._counters[tenant]
                self._last_turns.pop(tenant, None)
            tries -= 1

    def _push(self, tenant: str) -> None:
        head = self._by_tenant[tenant].head
        assert head is not None, "the tenant has a queued sequence"
        heappush(self._heap, self._heap_entry(tenant, head))
        if len(self._heap) > 2 * len(self._by_tenant) + 64:
            heads = ((of, queue.head) for of, queue in self._by_tenant.items())
            self._heap = [self._heap_entry(of, head) for of, head in heads if head is not None]
            heapify(self._heap)

    def _heap_entry(self, tenant: str, head: Sequence) -> HeapEntry:
        return self._counters[tenant], self._last_turns.get(tenant, 0), head.rank, tenant

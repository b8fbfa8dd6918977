"""Fair between tenants: the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", 2024)."""

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace

from quire.scheduler.queue.fcfs import Ranked
from quire.scheduler.queue.waiting_queue import Queue
from quire.scheduler.sequence import Rank, Sequence
from quire.scheduler.step_builder import Entry

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # what a token counts: one of a prompt that is computed, one that is generated
Place = tuple[int, int, Rank, str]  # counter, last turn, head, tenant
MOST_TENANTS = 4096  # that are remembered while none of their sequences waits


class Fair(Queue):
    """The tenant that was served least is next; of equals the one whose turn was longest ago; within a tenant, arrival.

    A tenant's counter rises by what is computed for it: at its admission by the tokens of a prompt that were not
    found, then by each token that is generated. What is computed twice because its memory was taken counts once. One
    that has nobody in the queue earns nothing meanwhile: when it comes back, its counter is lifted to the least of
    those who wait, or where nobody does, to that of who was admitted last.
    """

    def __init__(self, credit: int = 0) -> None:
        """credit: what a tenant may have been served less than the others when it comes back."""
        self._credit = credit
        self._lines: dict[str, Ranked] = {}  # of tenants that have somebody in the queue
        self._counters: OrderedDict[str, int] = OrderedDict()  # whoever came or was served longest ago is first
        self._turns: dict[str, int] = {}  # of those, when somebody was admitted last: the number of that admission
        self._num_turns = 0
        self._heap: list[Place] = []  # of each line one at least; may stand too early, never too late
        self._latest = ""  # tenant of who was admitted last
        self._length = 0

    @property
    def head(self) -> Sequence | None:
        """See Queue."""
        while self._heap:
            tenant = self._heap[0][-1]
            line = self._lines.get(tenant)
            if line is None or line.head is None:
                heappop(self._heap)
                continue
            place = self._place(tenant, line.head)
            if place == self._heap[0]:
                return line.head
            heapreplace(self._heap, place)
        return None

    def __len__(self) -> int:
        return self._length

    def __contains__(self, seq: Sequence) -> bool:
        line = self._lines.get(seq.request.namespace.tenant)
        return line is not None and seq in line

    def counter(self, tenant: str) -> int:
        """What a tenant was served, and given for its absence; 0 for one that is unknown or forgotten."""
        return self._counters.get(tenant, 0)

    def put(self, seq: Sequence) -> None:
        """See Queue."""
        tenant = seq.request.namespace.tenant
        line = self._lines.get(tenant)
        if line is None:
            least = self.counter(self._latest) if self.head is None else self._heap[0][0]
            line = self._lines[tenant] = Ranked()
            self._note(tenant, max(self.counter(tenant), least - self._credit))
        line.put(seq)
        self._length += 1
        if line.head is seq:
            self._push(tenant)

    def remove(self, seq: Sequence) -> None:
        """See Queue."""
        tenant = seq.request.namespace.tenant
        line = self._lines[tenant]
        line.remove(seq)
        self._length -= 1
        if not line.head:
            del self._lines[tenant]
            self._forget()

    def num_tokens_before(self, seq: Sequence) -> int:
        """See Queue. Others may be served more than this tenant, or less."""
        line = self._lines.get(seq.request.namespace.tenant)
        return 0 if line is None else line.num_tokens_before(seq)

    def admitted(self, seq: Sequence, num_new: int) -> None:
        """See Queue."""
        self._latest = seq.request.namespace.tenant
        self._num_turns += 1
        self._turns[self._latest] = self._num_turns
        self._charge(self._latest, PROMPT_WEIGHT * num_new)

    def served(self, entries: Iterable[Entry], counts: Iterable[int]) -> None:
        """See Queue."""
        generated: dict[str, int] = {}
        for entry, count in zip(entries, counts, strict=True):
            tenant = entry[0].request.namespace.tenant
            generated[tenant] = generated.get(tenant, 0) + count
        for tenant, count in generated.items():
            self._charge(tenant, OUTPUT_WEIGHT * count)

    def _charge(self, tenant: str, tokens: int) -> None:
        """A counter that rises need not move in the heap: it is put right when it comes up."""
        self._note(tenant, self.counter(tenant) + tokens)

    def _note(self, tenant: str, counter: int) -> None:
        self._counters[tenant] = counter
        self._counters.move_to_end(tenant)
        self._forget()

    def _forget(self) -> None:
        """Of tenants that have nobody in the queue, those that were served longest ago."""
        tries = 2  # as many leave as come, in the long run
        while len(self._counters) > MOST_TENANTS + len(self._lines) and tries:
            tenant = next(iter(self._counters))
            if tenant in self._lines:
                self._counters.move_to_end(tenant)
            else:
                del self._counters[tenant]
                self._turns.pop(tenant, None)
            tries -= 1

    def _push(self, tenant: str) -> None:
        head = self._lines[tenant].head
        assert head is not None, "somebody was put there"
        heappush(self._heap, self._place(tenant, head))
        if len(self._heap) > 2 * len(self._lines) + 64:
            heads = ((of, line.head) for of, line in self._lines.items())
            self._heap = [self._place(of, head) for of, head in heads if head is not None]
            heapify(self._heap)

    def _place(self, tenant: str, head: Sequence) -> Place:
        return self._counters[tenant], self._turns.get(tenant, 0), head.rank, tenant

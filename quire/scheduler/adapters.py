"""The slots and bytes of adapters in memory, and the requests that wait for an adapter.

A request holds its adapter from the moment at which the adapter is resident until its last sequence has ended. An
adapter is idle if no request holds it and no step in flight may read its slot. Only idle adapters that are not pinned
are evicted, the least recently used first, and only to make room for a load.

Requests whose adapter is resident pass those that wait for a load. The others wait in the order of arrival of their
tenant, and the tenants take turns. Several requests share one load. At most MOST_LOADS are in progress. If the first of
all lacks room, adapters that make enough room are drained: requests for them wait like those for new adapters, so that
they become idle.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from quire.config import SchedulerConfig
from quire.core.adapter import NO_ADAPTERS, Adapter, AdapterLoad
from quire.core.request import Request
from quire.errors import RequestError

MOST_NAMES = 64  # with counts of requests
MOST_LOADS = 8  # in progress: the loader does one after the other, so that a tenant waits for few loads of others
_PINS = "\0pins"  # the tenant of pins, whose adapters wait like those of requests; no credential maps to it


@dataclass(slots=True)
class AdapterSlot:
    """An adapter that is resident or being loaded."""

    adapter: Adapter
    slot: int
    is_resident: bool = False
    holders: dict[str, None] = field(default_factory=dict)  # ids of requests that hold it, or wait for its load
    used: int = 0  # number of its last use
    last_step: int = -1  # planned last when its last holder ended


class AdapterSlots:
    """The slots 1 to `max_loras` and the bytes of adapters. Pure: its owner passes the ids of steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_slots = config.max_loras
        self.num_bytes = config.lora_bytes
        self.num_loads = 0  # completed
        self.num_evicted = 0
        self._slots: dict[str, AdapterSlot] = {}  # by digest
        self._free = list(range(1, config.max_loras + 1))[::-1]
        # by tenant, next to be served first: the ids of waiting requests by digest, in order of arrival
        self._waiting: dict[str, dict[str, dict[str, None]]] = {}
        self._wanted: dict[str, Adapter] = {}  # adapters for which requests or pins wait, by digest
        self._pinned: dict[str, Adapter] = {}
        self._drained: set[str] = set()
        self._unsent: dict[int, str] = {}  # digests that slots got since the last planned step
        self._loads: list[AdapterLoad] = []  # not taken yet
        self._num_uses = 0

    @property
    def has_work(self) -> bool:
        """Whether an adapter waits for room, is to be loaded, or is being loaded."""
        return bool(self._wanted or self._num_loading)

    @property
    def resident(self) -> list[Adapter]:
        """The resident adapters."""
        return [one.adapter for one in self._slots.values() if one.is_resident]

    @property
    def _num_loading(self) -> int:
        return sum(not one.is_resident for one in self._slots.values())

    @property
    def bytes_used(self) -> int:
        """Bytes of adapters that are resident or being loaded."""
        return sum(one.adapter.num_bytes for one in self._slots.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room or for a load."""
        queued = sum(len(ids) for wanted in self._waiting.values() for ids in wanted.values())
        return queued + sum(len(one.holders) for one in self._slots.values() if not one.is_resident)

    def requests_by_name(self, running: Iterable[Request]) -> dict[str, tuple[int, int]]:
        """(running, waiting) requests by the name of their adapter: the names with the most requests.

        running: the requests with a running sequence, each any number of times.
        """
        if not (self._slots or self._waiting):
            return {}
        totals = {digest: len(one.holders) for digest, one in self._slots.items()}
        for wanted in self._waiting.values():
            for digest, ids in wanted.items():
                totals[digest] = totals.get(digest, 0) + len(ids)
        run = Counter({one.id: one.adapter.digest for one in running if one.adapter is not None}.values())
        names = {digest: one.adapter.name for digest, one in self._slots.items()}
        names |= {digest: one.name for digest, one in self._wanted.items()}
        counts: dict[str, tuple[int, int]] = {}
        for digest, total in sorted(totals.items(), key=lambda one: -one[1])[:MOST_NAMES]:
            before = counts.get(names[digest], (0, 0))
            if total:
                counts[names[digest]] = before[0] + run[digest], before[1] + total - run[digest]
        return counts

    def check_request(self, request: Request) -> None:
        """Raise RequestError for a request whose adapter could never be loaded."""
        adapter = request.adapter
        if adapter is None:
            return
        self._check_fits(adapter)
        others = {digest: one for digest, one in self._pinned.items() if digest != adapter.digest}
        if not self._fit((*others.values(), adapter)):
            raise RequestError(
                f"the adapter {adapter.name!r} does not fit beside the pinned ones; unpin one, or start the server "
                "with a larger --max-loras or --lora-memory",
                "adapter",
            )

    def add(self, request: Request) -> bool:
        """Take a request with an adapter. Returns whether it holds the adapter now; otherwise it waits."""
        adapter = request.adapter
        assert adapter is not None, "only requests with an adapter are added"
        slot = self._slots.get(adapter.digest)
        if slot is not None and adapter.digest not in self._drained:
            slot.holders[request.id] = None
            self._use(slot)
            return slot.is_resident
        self._want(request.namespace.tenant, adapter)[request.id] = None
        return False

    def release(self, request: Request, last_step: int) -> None:
        """A request has ended, whether it waited or not. last_step: id of the newest step in flight; -1 without one."""
        if request.adapter is None:
            return
        digest = request.adapter.digest
        slot = self._slots.get(digest)
        if slot is not None and request.id in slot.holders:
            del slot.holders[request.id]
            slot.last_step = last_step
            self._use(slot)
            return
        tenant = request.namespace.tenant
        ids = self._waiting.get(tenant, {}).get(digest)
        if ids is not None and request.id in ids:  # otherwise its load has failed
            del ids[request.id]
            if not ids:
                self._stop_waiting(tenant, digest)

    def advance(self, oldest_step: int | None) -> list[str]:
        """Start the loads for which there is room. Returns the ids of waiting requests that hold their adapter now.

        oldest_step: id of the oldest step in flight.
        """
        begun: list[str] = []
        while self._waiting and self._num_loading < MOST_LOADS:
            tenant = next(iter(self._waiting))
            digest = next(iter(self._waiting[tenant]))
            if digest in self._slots:  # resident and drained until now: it is its turn
                begun += self._hold_waiting(digest)
            else:
                victims = self._victims(self._wanted[digest], oldest_step)
                if victims is None or not all(self._is_idle(one, oldest_step) for one in victims):
                    self._drained = {one.adapter.digest for one in victims or ()}
                    break
                self._load(self._wanted[digest], victims)
                self._waiting[tenant] = self._waiting.pop(tenant)  # the others are next
                self._hold_waiting(digest)
            self._drained.clear()
        else:
            self._drained.clear()
        for digest in [one for one in self._wanted if one in self._slots and one not in self._drained]:
            begun += self._hold_waiting(digest)
        return begun

    def take_loads(self) -> list[AdapterLoad]:
        """Return and clear the loads to be started."""
        loads, self._loads = self._loads, []
        return loads

    def loaded(self, digest: str, *, failed: bool) -> list[str]:
        """A load has ended. Returns the requests that waited for it. Failed ones are forgotten, with their pin.

        Ignores an adapter that is not being loaded.
        """
        slot = self._slots.get(digest)
        if slot is None or slot.is_resident:
            return []
        if failed:
            self._pinned.pop(digest, None)
            self._remove(slot)
            return list(slot.holders)
        self.num_loads += 1
        slot.is_resident = True
        self._unsent[slot.slot] = digest
        return list(slot.holders)

    def pin(self, adapter: Adapter) -> None:
        """Load an adapter and never evict it.

        Raises RequestError if it does not fit beside the other pinned ones and each one that requests wait for.
        """
        self._check_fits(adapter)
        pinned = {**self._pinned, adapter.digest: adapter}
        if not self._fit(pinned.values()):
            raise RequestError(
                f"the adapter {adapter.name!r} does not fit beside the other pinned ones; unpin one, or start the "
                "server with a larger --max-loras or --lora-memory",
                "adapter",
            )
        for other in self._wanted.values():
            if not self._fit({**pinned, other.digest: other}.values()):
                raise RequestError(
                    f"requests wait for the adapter {other.name!r}, which would not fit beside the pinned ones; pin "
                    f"{adapter.name!r} later",
                    "adapter",
                )
        self._pinned = pinned
        self._drained.discard(adapter.digest)
        if adapter.digest not in self._slots:
            self._want(_PINS, adapter)

    def unpin(self, digest: str) -> None:
        """Let an adapter be evicted again. Ignores one that is not pinned."""
        self._pinned.pop(digest, None)
        if digest in self._waiting.get(_PINS, ()):
            self._stop_waiting(_PINS, digest)

    def slot_of(self, adapter: Adapter | None) -> int:
        """The slot of a resident adapter; 0 for None."""
        return 0 if adapter is None else self._slots[adapter.digest].slot

    def take_unsent(self, *, every: bool) -> list[tuple[int, str]]:
        """(slot, digest) of the adapters that became resident since the last call; every: of all resident ones."""
        if every:
            self._unsent = {one.slot: digest for digest, one in self._slots.items() if one.is_resident}
        unsent, self._unsent = self._unsent, {}
        return sorted(unsent.items())

    def check(self, requests: Collection[Request]) -> list[str]:
        """Errors; empty if there are none. requests: all unfinished ones."""
        wrong = []
        numbers = sorted([*self._free, *(one.slot for one in self._slots.values())])
        if numbers != list(range(1, self.num_slots + 1)):
            wrong.append(f"the slots of adapters are {numbers}")
        if self.bytes_used > self.num_bytes:
            wrong.append(f"adapters use {self.bytes_used} bytes of {self.num_bytes}")
        held = {(name, digest) for digest, one in self._slots.items() for name in one.holders}
        waiting = {(name, digest) for some in self._waiting.values() for digest, ids in some.items() for name in ids}
        wanted = {(one.id, one.adapter.digest) for one in requests if one.adapter is not None}
        if held & waiting or held | waiting != wanted:
            wrong.append(
                f"adapters are held by {sorted(held)} and waited for by {sorted(waiting)}, not {sorted(wanted)}"
            )
        if any(not self._slots[digest].is_resident for digest in self._drained):
            wrong.append("an adapter is drained that is not resident")
        if {digest for some in self._waiting.values() for digest in some} != self._wanted.keys():
            wrong.append("the wanted adapters are not those for which requests or pins wait")
        return wrong

    # Room

    def _check_fits(self, adapter: Adapter) -> None:
        if not self.num_slots:
            raise RequestError(NO_ADAPTERS, "adapter")
        if adapter.num_bytes > self.num_bytes:
            raise RequestError(
                f"the adapter {adapter.name!r} has {adapter.num_bytes} bytes, and all adapters have {self.num_bytes}; "
                "start the server with a larger --lora-memory",
                "adapter",
            )

    def _fit(self, adapters: Collection[Adapter]) -> bool:
        """Whether adapters can be resident at the same time."""
        return len(adapters) <= self.num_slots and sum(one.num_bytes for one in adapters) <= self.num_bytes

    def _is_idle(self, slot: AdapterSlot, oldest_step: int | None) -> bool:
        return not slot.holders and (oldest_step is None or oldest_step > slot.last_step)

    def _victims(self, adapter: Adapter, oldest_step: int | None) -> list[AdapterSlot] | None:
        """The adapters whose eviction makes room for another one, idle ones first; None if there are not enough."""
        kept = [one.adapter for one in self._slots.values()]
        candidates = sorted(
            (one for digest, one in self._slots.items() if one.is_resident and digest not in self._pinned),
            key=lambda one: (
                not self._is_idle(one, oldest_step),
                bool(one.holders),
                one.adapter.digest not in self._drained,
                one.used,
            ),
        )
        victims: list[AdapterSlot] = []
        while not self._fit([*kept, adapter]):
            if len(victims) == len(candidates):
                return None
            victims.append(candidates[len(victims)])
            kept.remove(victims[-1].adapter)
        return victims

    def _load(self, adapter: Adapter, victims: list[AdapterSlot]) -> None:
        for one in victims:
            self._remove(one)
        self.num_evicted += len(victims)
        self._slots[adapter.digest] = AdapterSlot(adapter, self._free.pop())
        self._use(self._slots[adapter.digest])
        self._loads.append(AdapterLoad(adapter, tuple(one.adapter.digest for one in victims)))

    def _remove(self, slot: AdapterSlot) -> None:
        del self._slots[slot.adapter.digest]
        self._unsent.pop(slot.slot, None)
        self._free.append(slot.slot)

    def _use(self, slot: AdapterSlot) -> None:
        self._num_uses += 1
        slot.used = self._num_uses

    # Waiting

    def _want(self, tenant: str, adapter: Adapter) -> dict[str, None]:
        """The ids of the requests of a tenant that wait for an adapter."""
        self._wanted[adapter.digest] = adapter
        return self._waiting.setdefault(tenant, {}).setdefault(adapter.digest, {})

    def _stop_waiting(self, tenant: str, digest: str) -> None:
        """Nothing of a tenant waits for an adapter any more."""
        del self._waiting[tenant][digest]
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        if not any(digest in wanted for wanted in self._waiting.values()):
            del self._wanted[digest]

    def _hold_waiting(self, digest: str) -> list[str]:
        """Let all requests that wait for an adapter with a slot hold it. Returns their ids."""
        slot = self._slots[digest]
        held: list[str] = []
        for tenant in [tenant for tenant, wanted in self._waiting.items() if digest in wanted]:
            held += self._waiting[tenant][digest]
            self._stop_waiting(tenant, digest)
        slot.holders.update(dict.fromkeys(held))
        self._use(slot)
        return held

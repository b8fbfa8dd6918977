"""LoadedAdapters: the adapters in memory by digest, and the slots of those that rows may use."""

from quire.lora.tables import AdapterTables, PackedAdapters


class LoadedAdapters:
    """The adapters of one model. All methods must be called from the engine's thread."""

    def __init__(self, tables: AdapterTables) -> None:
        self.num_slots = tables.num_slots  # slots 1 to num_slots
        self._tables = tables
        self._packed: dict[str, PackedAdapters] = {}
        self._slots: dict[int, str] = {}  # slot -> digest
        self._width = 0

    @property
    def width(self) -> int:
        """A `width` for `Kernels.low_rank` with any adapter that has a slot: a power of two, so that few are captured.

        0 without adapters.
        """
        return self._width

    def add(self, digest: str, packed: PackedAdapters) -> None:
        """Keep an adapter, for `put`."""
        self._packed[digest] = packed

    def put(self, slot: int, digest: str) -> None:
        """Put an adapter into a slot, in place of the one before.

        Raises ValueError unless it was added, and for a slot that the tables do not have.
        """
        if not 1 <= slot <= self.num_slots:
            raise ValueError(f"slot {slot} of an adapter is not from 1 to {self.num_slots}")
        packed = self._packed.get(digest)
        if packed is None:
            raise ValueError(f"the adapter {digest} is not in memory")
        self._tables.put(slot, packed)
        self._slots[slot] = digest
        self._measure()

    def drop(self, digest: str) -> None:
        """Release an adapter that no launched step uses, and empty its slot. Ignores an unknown one."""
        self._packed.pop(digest, None)
        for slot in [slot for slot, other in self._slots.items() if other == digest]:
            self._tables.put(slot, None)
            del self._slots[slot]
        self._measure()

    def _measure(self) -> None:
        most = max((self._tables.width(self._packed[digest]) for digest in self._slots.values()), default=0)
        self._width = 1 << (most - 1).bit_length() if most else 0

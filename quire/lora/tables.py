"""The adapters of a decoder's products, by slot."""

from collections.abc import Mapping, Sequence

from quire.kernels.contract import Kernels, LowRank, PackedAdapter
from quire.layers.linear import Linear
from quire.models.decoder import Decoder

PackedAdapters = Mapping[str, PackedAdapter]  # of one adapter, by the names of the decoder's parameters


class AdapterTables:
    """A table for each product of a decoder, from which its layers read."""

    def __init__(self, model: Decoder, kernels: Kernels, num_slots: int) -> None:
        """kernels: those for which the model was loaded. num_slots: without slot 0, which is for no adapter."""
        self.num_slots = num_slots
        self._kernels = kernels
        self._linears = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, Linear) and module is not model.class_head
        }
        for linear in self._linears.values():
            linear.adapter_table = kernels.new_adapter_table(linear.weight, num_slots)

    def pack(self, matrices: Mapping[str, Sequence[LowRank]]) -> PackedAdapters:
        """The matrices of an adapter, by parameter, in the layout of the kernels. Any thread may call it."""
        return {name: self._kernels.pack_adapter(self._linears[name].weight, some) for name, some in matrices.items()}

    def put(self, slot: int, packed: PackedAdapters | None) -> None:
        """Put an adapter into a slot, in place of the one before; None: empty it. No launched step may use the slot."""
        for name, linear in self._linears.items():
            self._kernels.set_adapter(linear.adapter_table, slot, None if packed is None else packed.get(name))

    def width(self, packed: PackedAdapters) -> int:
        """The width that a pass with the adapter needs: see Kernels.low_rank."""
        return max(map(self._kernels.adapter_width, packed.values()))

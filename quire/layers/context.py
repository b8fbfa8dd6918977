"""ForwardContext: what a forward pass has beside weights and activations. Each layer gets it and passes it on."""

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.contract import Kernels
from quire.layers.attend import Attend
from quire.layers.recur import Recur


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The adapters of the tokens of a pass."""

    slots: Tensor  # int32 (num_tokens,), 0: none
    width: int  # see Kernels.low_rank


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """The kernels, the attention over the KV of the step, and the positions and adapters of its tokens."""

    kernels: Kernels
    attend: Attend
    positions: Tensor  # int64 (num_tokens,); empty for heads, which need none
    adapters: AdapterRows | None = None  # None: no token has an adapter
    recur: Recur | None = None  # None: the model has no layers with a recurrence

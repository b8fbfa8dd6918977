"""ForwardContext: what a forward pass has beside weights and activations. Each layer gets it and passes it on."""

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.contract import Kernels
from quire.layers.attend import Attend


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """The kernels, the attention over the KV of the step, and the positions of its tokens."""

    kernels: Kernels
    attend: Attend
    positions: Tensor  # int64 (num_tokens,); empty for heads, which need none

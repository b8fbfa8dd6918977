"""Quantization at load: the schemes of a model's weights.

Weights of the layers' projections are stored in few bits. The head, or the embedding table that is also the head, has
8 bits at least, because its errors go into every logit. Norms, biases, routers and gates of experts keep the model's
type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.kernels.contract import INT4, INT8, Scheme

_HEADS = ("head.weight", "embed.weight")
_PROJECTIONS = ("qkv.weight", "o.weight", "up.weight", "down.weight", "mlp.up", "mlp.down")


@dataclass(frozen=True, slots=True)
class Quantization:
    """Schemes of the weights that a decoder multiplies."""

    layers: Scheme  # of the projections of layers, experts included
    head: Scheme

    def scheme_of(self, parameter: str, *, tied: bool) -> Scheme | None:
        """The scheme of a parameter of the decoder; None if it keeps the model's type.

        tied: whether the embedding table is also the head.
        """
        if parameter in _HEADS:
            return self.head if parameter == _HEADS[tied] else None
        return self.layers if parameter.startswith("layers.") and parameter.endswith(_PROJECTIONS) else None


QUANTIZATIONS: Mapping[str, Quantization] = MappingProxyType(
    {"int8": Quantization(INT8, INT8), "int4": Quantization(INT4, INT8)}
)

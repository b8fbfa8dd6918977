"""The weights of a model that adapters may change, by the names that PEFT gives to their modules.

PEFT has the names of transformers' modules. Most are those of the tensors of a checkpoint, but the first parts depend
on the class that was trained (with or without a head, alone or as a part of a multimodal model), and some modules of
mixtures were renamed.
"""

from collections.abc import Iterator

from quire.models.description import ModelDescription
from quire.weights.placement import Placement

_OUTER = ("", "model.language_model.", "model.text_model.", "language_model.")  # of the text model in a multimodal one
_INNER = ("", "model.decoder.", "model.", "decoder.", "transformer.", "gpt_neox.", "backbone.")
_HEAD = "lm_head"
_ROUTERS = ("mlp.gate", "mlp.router")
_SHARED = ("mlp.shared_experts.", "mlp.shared_expert.")
_DECAYS = (".self_attn.f_", ".self_attn.forget_gate.f_")  # in checkpoints of Kimi Linear, and in transformers
_EMBEDDINGS = ("embed", "positions", "layer_inputs")  # parameters
_CLASS_HEAD = "class_head"


class Products:
    """The weights of a model's products, by module."""

    def __init__(self, model: ModelDescription) -> None:
        self._model = model
        self._names: dict[str, str] = {}  # in the checkpoint, with all parts but the last
        for name, place in model.weight_map.items():
            if name.endswith(".weight") and place.part is None and len(place.shape) == 2:
                source = name.removesuffix(".weight")
                for spelled in self._spellings(source, place.parameter):
                    self._names.setdefault(spelled, source)

    def find(self, module: str) -> tuple[str, Placement]:
        """The name of a module in the checkpoint, and the place of its weight.

        Raises LookupError with the reason for a module that cannot have an adapter.
        """
        source = next((self._names[short] for short in _without_prefix(module) if short in self._names), None)
        if source is None:
            raise LookupError(self._why_unknown(module))
        place = self._model.weight_map[f"{source}.weight"]
        parameter = place.parameter.split(".")[-2]
        if parameter in _EMBEDDINGS:
            raise LookupError("it is an embedding, and quire adapts products only")
        if parameter == _CLASS_HEAD:
            raise LookupError("it is the classification head, which quire does not adapt")
        if parameter.endswith("norm"):
            raise LookupError("it is a norm, and quire adapts products only")
        return source, place

    def _spellings(self, name: str, parameter: str) -> Iterator[str]:
        """The names of a module without the prefix of the model. name: in the checkpoint."""
        names = self._model.names
        short = name.removeprefix(names.prefix)
        yield short
        if name == names.head:
            yield _HEAD
        if parameter.endswith(".router.weight"):
            yield from (short.removesuffix(names.router) + router for router in _ROUTERS)
        elif ".shared." in parameter:
            yield from (short.replace(names.shared, shared) for shared in _SHARED)
        elif ".recurrence." in parameter:
            yield short.replace(_DECAYS[0], _DECAYS[1])

    def _why_unknown(self, module: str) -> str:
        last = module.rpartition(".")[2]
        if ".experts." in module or module.endswith(".experts"):
            return "it is of an expert, and quire adapts products of all tokens only"
        if self._model.config.tied and last in (_HEAD, self._model.names.head):
            return "the model's head is its embedding, which quire does not adapt"
        return f"{self._model.architecture} has no such product"


def _without_prefix(module: str) -> Iterator[str]:
    """What may be the name of a module without the prefix of the model, the shortest cut first."""
    for outer in _OUTER:
        if module.startswith(outer):
            rest = module.removeprefix(outer)
            yield from (rest.removeprefix(inner) for inner in _INNER if rest.startswith(inner))

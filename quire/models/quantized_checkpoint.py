"""A checkpoint whose linear layers are quantized, as a Checkpoint with one weight for each layer."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from quire.errors import ModelError
from quire.kernels.contract import QuantizedRows, Scheme
from quire.models.checkpoint import Checkpoint, StoredTensor
from quire.models.json_file import read_json_object
from quire.quant.layouts import Layer, Part, Tensors, layout_of
from quire.quant.schemes import convert

_CONFIG = "quantization_config"
_MODELOPT_FILE = "hf_quant_config.json"  # has the settings of ModelOpt if config.json does not
_UNUSED = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".output_scale",
)  # of KV and outputs, which have scales of their own here


def open_layers(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or a QuantizedCheckpoint if its folder has settings of quantization. Raises ModelError."""
    settings, file = checkpoint.config.get(_CONFIG), checkpoint.path / _MODELOPT_FILE
    if settings is None and file.is_file():
        found = read_json_object(file).get("quantization")
        settings = {"quant_method": "modelopt", **found} if isinstance(found, dict) else found
    return checkpoint if settings is None else QuantizedCheckpoint(checkpoint, settings)


class QuantizedCheckpoint:
    """Implements Checkpoint. The constructor raises ModelError for a layout that is not supported or does not fit."""

    def __init__(self, checkpoint: Checkpoint, settings: object) -> None:
        if not isinstance(settings, dict):
            raise ModelError(f"{checkpoint.path}: {_CONFIG} must be an object, not {settings!r:.80}; download it again")
        try:
            self._layout = layout_of(settings)
        except ValueError as error:
            raise ModelError(f"{checkpoint.path}: {_CONFIG}: {error}") from error
        self.quant_method = str(settings["quant_method"])
        self._checkpoint = checkpoint
        self._config = {name: value for name, value in checkpoint.config.items() if name != _CONFIG}
        self._layers: dict[str, Layer] = {}  # by the name of the weight
        self._parts: dict[str, dict[str, str]] = {}  # of a weight: last component -> name of a tensor
        self._tensors = self._join()

    @property
    def path(self) -> Path:
        """The folder or file."""
        return self._checkpoint.path

    @property
    def config(self) -> Mapping[str, object]:
        """The fields of config.json without quantization_config."""
        return self._config

    @property
    def generation_config(self) -> Mapping[str, object]:
        """The fields of generation_config.json."""
        return self._checkpoint.generation_config

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by name, with one weight for each quantized layer."""
        return self._tensors

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor). Weights of quantized layers become float32, layer by layer, after all others."""
        wanted = list(names)
        yield from self._checkpoint.read(name for name in wanted if name not in self._layers)
        for name in wanted:
            if name in self._layers:
                tensors, layer = self._read_parts(name), self._layers[name]
                try:
                    yield name, self._layout.numbers(tensors, layer)
                except ValueError as error:
                    raise self._error(name, error) from error

    def read_codes(self, schemes: Mapping[str, Scheme]) -> Iterator[tuple[str, QuantizedRows]]:
        """Yield (name, rows): see Checkpoint. Raises ModelError for scales that are not finite."""
        for name, scheme in schemes.items():
            layer = self._layers[name]
            try:
                rows = self._layout.codes(self._read_parts(name), layer)
                if not rows.scales.isfinite().all():
                    raise ValueError("its scales are not finite; download it again")
            except ValueError as error:
                raise self._error(name, error) from error
            yield name, convert(rows, layer.scheme or scheme, scheme)

    def _read_parts(self, name: str) -> Tensors:
        by_name = {full: last for last, full in self._parts[name].items()}
        return {by_name[full]: tensor for full, tensor in self._checkpoint.read(by_name)}

    def _join(self) -> dict[str, StoredTensor]:
        stored = self._checkpoint.tensors
        known = (self._layout.marker, *self._layout.others)
        rest = {name: one for name, one in stored.items() if not name.endswith(_UNUSED)}
        for marker in [name for name in rest if name.endswith(f".{self._layout.marker}")]:
            base = marker.removesuffix(self._layout.marker)
            parts = {last: base + last for last in known if base + last in stored}
            name = f"{base}weight"
            try:
                layer = self._layout.layer(
                    {last: Part(stored[full].shape, stored[full].dtype) for last, full in parts.items()}
                )
            except ValueError as error:
                raise self._error(name, error) from error
            if layer is None:
                continue
            self._layers[name], self._parts[name] = layer, parts
            for full in parts.values():
                rest.pop(full, None)
            num_bytes = sum(stored[full].num_bytes for full in parts.values())
            shape, dtype = (layer.rows, layer.columns), type(self._layout).__name__
            rest[name] = StoredTensor(stored[marker].file, shape, dtype, num_bytes, is_float=True, scheme=layer.scheme)
        return rest

    def _error(self, name: str, error: ValueError) -> ModelError:
        return ModelError(f"{self.path}: {name}: {error}")

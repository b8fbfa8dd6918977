"""A checkpoint whose linear layers are quantized, as a Checkpoint with one weight for each layer."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from quire.errors import ModelError
from quire.kernels.contract import QuantizedRows, Scheme
from quire.weights.checkpoint import WHOLE, Checkpoint, Ranges, StoredTensor, part_of
from quire.weights.json_file import read_json_object
from quire.weights.layouts import Layer, Part, Tensors, layout_of
from quire.weights.schemes import convert, part_of_rows

_CONFIG = "quantization_config"
_OLD_CONFIG = "compression_config"  # compressed-tensors' name for it in early checkpoints
# files that have the settings if config.json does not -> the layout, if the settings do not name it
SETTINGS_FILES = MappingProxyType(
    {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
)
# ends of the names of tensors that only quantized layers have
_CODES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2")
# of KV, queries and outputs, which have scales of their own here
_UNUSED = tuple(f".{of}{last}" for of in ("k", "v", "q", "kv", "prob", "output") for last in ("_scale", "_zero_point"))


def open_layers(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or a QuantizedCheckpoint if its folder has settings of quantization. Raises ModelError."""
    origin, settings = _settings(checkpoint)
    if settings is not None:
        return QuantizedCheckpoint(checkpoint, settings, origin)
    if found := next((name for name in checkpoint.tensors if name.endswith(_CODES)), None):
        raise ModelError(
            f"{checkpoint.path}: {found} belongs to a quantized layer, but the settings of quantization are missing: "
            f"config.json has no {_CONFIG}, and there is no {' or '.join(SETTINGS_FILES)}; download these files"
        )
    return checkpoint


def _settings(checkpoint: Checkpoint) -> tuple[str, object]:
    """The settings of quantization, or None, and the name of the field or file that has them. Raises ModelError."""
    for name in (_CONFIG, _OLD_CONFIG):
        if (found := checkpoint.config.get(name)) is not None:
            return name, _named(found, "compressed-tensors" if name == _OLD_CONFIG else None)
    for name, method in SETTINGS_FILES.items():
        if (file := checkpoint.path / name).is_file():
            return name, _named(read_json_object(file), method)
    return _CONFIG, None


def _named(settings: object, method: str | None) -> object:
    """Settings with `quant_method`: if they do not name it, `method`. ModelOpt's may be in a field `quantization`."""
    if isinstance(settings, dict) and "quantization" in settings:
        settings, method = settings["quantization"], "modelopt"
    return {"quant_method": method, **settings} if isinstance(settings, dict) and method else settings


class QuantizedCheckpoint:
    """Implements Checkpoint. The constructor raises ModelError for a layout that is not supported or does not fit."""

    def __init__(self, checkpoint: Checkpoint, settings: object, origin: str = _CONFIG) -> None:
        """origin: the name of the field or file that has the settings."""
        if not isinstance(settings, dict):
            raise ModelError(f"{checkpoint.path}: {origin} must be an object, not {settings!r:.80}; download it again")
        try:
            self._layout = layout_of(settings)
        except ValueError as error:
            raise ModelError(f"{checkpoint.path}: {origin}: {error}") from error
        self.quant_method = str(settings["quant_method"])
        self._checkpoint = checkpoint
        self._config = {name: value for name, value in checkpoint.config.items() if name != _CONFIG}
        self._layers: dict[str, Layer] = {}  # by the name of the weight
        self._parts: dict[str, dict[str, str]] = {}  # of a weight: last component -> name of a tensor
        self._experts: dict[str, int] = {}  # of a weight in a stack: its index there
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

    def read(self, names: Iterable[str], ranges: Mapping[str, Ranges] = WHOLE) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor). Weights of quantized layers become float32, layer by layer, after all others.

        The tensors of a quantized layer are read whole.
        """
        wanted = list(names)
        yield from self._checkpoint.read((name for name in wanted if name not in self._layers), ranges)
        for name, tensors, layer in self._read_layers(name for name in wanted if name in self._layers):
            try:
                yield name, part_of(self._layout.numbers(tensors, layer), ranges.get(name))
            except ValueError as error:
                raise self._error(name, error) from error

    def read_codes(
        self, schemes: Mapping[str, Scheme], ranges: Mapping[str, Ranges] = WHOLE
    ) -> Iterator[tuple[str, QuantizedRows]]:
        """Yield (name, rows): see Checkpoint. Raises ModelError for scales or float8 numbers that are not finite."""
        for name, tensors, layer in self._read_layers(schemes):
            try:
                rows = self._layout.codes(tensors, layer)
                if not rows.scales.isfinite().all():
                    raise ValueError("its scales are not finite; download it again")
                if layer.scheme is not None and layer.scheme.grid == "e4m3" and (rows.codes & 127 == 127).any():
                    raise ValueError("its float8 numbers are not finite; download it again")
            except ValueError as error:
                raise self._error(name, error) from error
            stored = layer.scheme or schemes[name]
            yield name, convert(part_of_rows(rows, stored, ranges.get(name)), stored, schemes[name])

    def _read_layers(self, names: Iterable[str]) -> Iterator[tuple[str, Tensors, Layer]]:
        """Yield (name, tensors, layer). A stack is read once: its layers follow each other."""
        together: dict[str, list[str]] = {}
        for name in names:
            together.setdefault(self._parts[name][self._layout.marker], []).append(name)
        for some in together.values():
            by_name = {full: last for last, full in self._parts[some[0]].items()}
            tensors = {by_name[full]: tensor for full, tensor in self._checkpoint.read(by_name)}
            for name in some:
                one = tensors
                if name in self._experts:
                    one = {last: tensor[self._experts[name]] for last, tensor in tensors.items()}
                yield name, one, self._layers[name]

    def _join(self) -> dict[str, StoredTensor]:
        stored = self._checkpoint.tensors
        known, separator = (self._layout.marker, *self._layout.others), self._layout.separator
        rest = {name: one for name, one in stored.items() if not name.endswith(_UNUSED)}
        ends = tuple(f"{separator}{last}" for last in self._layout.indices)
        values = dict(self._checkpoint.read(name for name in rest if ends and name.endswith(ends)))
        for marker in [name for name in rest if name.endswith(f"{separator}{self._layout.marker}")]:
            base = marker.removesuffix(f"{separator}{self._layout.marker}")
            parts = {last: full for last in known if (full := f"{base}{separator}{last}") in stored}
            try:
                layer = self._layout.layer(
                    {
                        last: Part(stored[full].shape, stored[full].dtype, values.get(full))
                        for last, full in parts.items()
                    }
                )
            except ValueError as error:
                raise self._error(f"{base}.weight", error) from error
            for last, full in parts.items():
                if layer is not None or last != "weight":
                    rest.pop(full, None)
            if layer is None:
                continue
            names = _names(base, layer)
            num_bytes = sum(stored[full].num_bytes for full in parts.values()) // len(names)
            shape, dtype = (layer.rows, layer.columns), type(self._layout).__name__
            for name in names:
                self._layers[name], self._parts[name] = layer, parts
                rest[name] = StoredTensor(
                    stored[marker].file, shape, dtype, num_bytes, is_float=True, scheme=layer.scheme
                )
            if layer.experts:
                self._experts |= {name: index for index, name in enumerate(names)}
        return rest

    def _error(self, name: str, error: ValueError) -> ModelError:
        return ModelError(f"{self.path}: {name}: {error}")


def _names(base: str, layer: Layer) -> list[str]:
    """The names of a layer's weights. Those of the stack `experts.down` are `experts.0.down.weight`, ..."""
    if not layer.experts:
        return [f"{base}.weight"]
    before, _, after = base.rpartition("experts.")
    return [f"{before}experts.{index}.{after}.weight" for index in range(layer.experts)]

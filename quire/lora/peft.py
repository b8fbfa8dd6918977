"""Adapters in PEFT's format: folders with adapter_config.json and adapter_model.safetensors."""

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import pad

from quire.core.adapter import Adapter
from quire.cost.memory_plan import format_bytes
from quire.errors import AdapterError, ModelError
from quire.kernels.contract import DTYPES, LowRank, low_rank_bytes
from quire.kernels.reference.low_rank import is_finite
from quire.lora.peft_config import PeftConfig, read_config
from quire.lora.peft_modules import Products
from quire.models.description import ModelDescription
from quire.models.model import Description
from quire.weights.checkpoint import header
from quire.weights.placement import Placement

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
MAX_BYTES = 2**34  # of the tensors, unless a caller says otherwise
_MAX_CONFIG_BYTES = 2**20
_MAX_RANK = 512
_PIECE = 2**20  # bytes that are read at once
_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?P<owner>lora_A|lora_B|base_layer)(\.default)?\.(?P<kind>weight|bias)"
)
_A, _B, _BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
_COPIES = ("base_layer.weight", "base_layer.bias")  # of the model's own, which PEFT adds for a head
_OTHER_METHODS = {  # part of a tensor's name -> what the tensor is
    "lora_embedding_A": "of an embedding",
    "lora_embedding_B": "of an embedding",
    "lora_magnitude_vector": "of DoRA",
    "modules_to_save": "a whole weight of the model",
}


class _Stored(NamedTuple):
    """Shape and type of a tensor in its file."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Matrices:
    """The matrices of one module, and where they go."""

    module: str  # as the tensors name it
    source: str  # as the checkpoint does
    names: Mapping[str, str]  # part of a tensor's name -> the whole
    place: Placement
    rank: int
    scale: float

    def num_bytes(self, dtype: str) -> int:
        """See `low_rank_bytes`."""
        rows, columns = _rows_and_columns(self.place)
        if latent := self.place.latent:
            rows, columns = latent.expanded_shape(rows)
        itemsize = self.dtype(dtype).itemsize
        return low_rank_bytes(self.rank, rows, columns, itemsize, has_bias=_BIAS in self.names)

    def dtype(self, dtype: str) -> torch.dtype:
        """The type of the matrices in a model that is computed in `dtype`."""
        return DTYPES["float32" if self.place.is_float32 else dtype]


def read_adapter(
    folder: Path,
    name: str,
    description: Description,
    dtype: str,
    *,
    root: Path | None = None,
    max_bytes: int = MAX_BYTES,
    memory: int | None = None,
) -> Adapter:
    """The adapter in a folder, checked against a model: of the tensors, the header is read, and all bytes are hashed.

    name: for messages and requests. dtype: of the model's computation. root: a folder that links may not leave; None:
    `folder`. max_bytes: of the tensors. memory: bytes that adapters may have; None: any number.
    Raises AdapterError if a file is missing, damaged or too large, or if the model cannot have the adapter.
    """
    model = _decoder(description, folder)
    config_file, file = _files(folder, root)
    config_data = _read(config_file, _MAX_CONFIG_BYTES)
    config = read_config(config_data, config_file, model.vocab_size)
    with _opened(file, max_bytes) as (opened, size):
        try:
            stored = {key: _Stored(one.shape, one.dtype) for key, one in header(file).items()}
        except ModelError as error:
            raise AdapterError(str(error)) from error
        matrices = _check(stored, config, model, file)
        num_bytes = sum(one.num_bytes(dtype) for one in matrices)
        if memory is not None and num_bytes > memory:
            raise AdapterError(
                f"{folder}: the adapter needs {format_bytes(num_bytes)}, and all adapters have {format_bytes(memory)}; "
                "raise --lora-memory"
            )
        digest, rest = begin_digest(config_data, size), size
        while piece := opened.read(min(_PIECE, rest + 1)):
            digest.update(piece)
            rest -= len(piece)
        if rest:
            raise _changed(file)
    return Adapter(
        digest=digest.hexdigest(),
        name=name,
        path=str(folder.absolute()),
        num_bytes=num_bytes,
        rank=max(one.rank for one in matrices),
        invocation_tokens=config.invocation_tokens,
    )


def load_adapter(
    adapter: Adapter,
    description: Description,
    dtype: str,
    *,
    root: Path | None = None,
    max_bytes: int = MAX_BYTES,
) -> dict[str, list[LowRank]]:
    """The matrices of an adapter by the decoder's parameters, in `dtype` or, for float32 parameters, in float32.

    Each file is read once. Raises AdapterError as `read_adapter` does, if the bytes have another digest than the
    adapter, and if a number is not finite.
    """
    folder = Path(adapter.path)
    model = _decoder(description, folder)
    config_file, file = _files(folder, root)
    config_data, data = _read(config_file, _MAX_CONFIG_BYTES), _read(file, max_bytes)
    digest = begin_digest(config_data, len(data))
    digest.update(data)
    if digest.hexdigest() != adapter.digest:
        raise AdapterError(f"{folder}: the files of adapter {adapter.name!r:.80} changed on disk; load it again")
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise AdapterError(f"{file} is damaged ({error}); save the adapter again") from error
    del data  # the tensors are a copy
    names = {kind: name for name, kind in _DTYPES.items()}
    stored = {key: _Stored(tuple(one.shape), names.get(one.dtype, str(one.dtype))) for key, one in tensors.items()}
    found: dict[str, list[LowRank]] = {}
    for one in _check(stored, read_config(config_data, config_file, model.vocab_size), model, file):
        kept, order = one.dtype(dtype), list(one.place.row_order)
        a, b = (_converted(tensors, one.names[part], kept, file) for part in (_A, _B))
        bias = _converted(tensors, one.names[_BIAS], kept, file) if _BIAS in one.names else None
        if latent := one.place.latent:
            a, b = pad(a, (0, latent.shared_dim)), latent.whole(b)
            bias = None if bias is None else latent.whole(bias[:, None]).flatten()
        if order:
            b, bias = b[order], None if bias is None else bias[order]
        found.setdefault(one.place.parameter, []).append(LowRank(a, b, one.place.start, one.scale, bias))
        _compare_copies(one, tensors, model, file)
    return found


def _decoder(description: Description, folder: Path) -> ModelDescription:
    if isinstance(description, ModelDescription):
        return description
    raise AdapterError(
        f"{folder}: {description.architecture} runs through transformers, and such models cannot have adapters in "
        "quire; merge the adapter into the model with PEFT's `merge_and_unload`"
    )


def _check(stored: Mapping[str, _Stored], config: PeftConfig, model: ModelDescription, file: Path) -> list[_Matrices]:
    """The matrices that the tensors are. Raises AdapterError unless they fit config and model, without a rest."""
    modules: dict[str, dict[str, str]] = {}  # name of a module -> part -> name of its tensor
    for name, tensor in stored.items():
        module, part = _parse(name, file)
        if tensor.dtype not in _DTYPES:
            raise AdapterError(f"{file}: {name} has the type {tensor.dtype}; supported: {', '.join(_DTYPES)}")
        if modules.setdefault(module, {}).setdefault(part, name) != name:
            raise AdapterError(f"{file}: {modules[module][part]} and {name} are the same matrix; remove one")
    if not modules:
        raise AdapterError(f"{file} has no tensors; save the adapter again")
    products, found = Products(model), dict[str, _Matrices]()  # by name in the checkpoint
    for module, names in sorted(modules.items()):
        try:
            source, place = products.find(module)
        except LookupError as error:
            why = f"{file}: {module} cannot have an adapter: {error.args[0]}; train the adapter without it"
            raise AdapterError(why) from error
        if source in found:
            raise AdapterError(f"{file}: {found[source].module} and {module} are the same module; remove one")
        if not config.is_target(module):
            raise AdapterError(f"{file} has matrices of {module}, which {CONFIG_FILE} does not target; save it again")
        found[source] = _matrices(module, source, names, place, stored, config, file)
        for part in _COPIES:
            if part in names and stored[names[part]].shape != _shape(model, source + part.removeprefix("base_layer")):
                raise _other_copy(names[part], file)
    if missing := config.names_without(modules):
        raise AdapterError(
            f"{file} has no matrices of {missing[0]!r:.80}, which target_modules has; save the adapter again, or "
            "remove the name"
        )
    return list(found.values())


def _parse(name: str, file: Path) -> tuple[str, str]:
    """The module and the part that a tensor's name says."""
    for other, what in _OTHER_METHODS.items():
        if f".{other}" in name:
            raise AdapterError(f"{file}: {name!r:.200} is {what}; quire loads matrices of products only")
    found = _NAME.fullmatch(name)
    part = "" if found is None else f"{found['owner']}.{found['kind']}"
    if found is None or part not in (_A, _B, _BIAS, *_COPIES):
        raise AdapterError(
            f"{file}: {name!r:.200} is no name that PEFT gives to a matrix: base_model.model.MODULE.lora_A.weight, "
            "lora_B.weight or lora_B.bias; save the adapter with PEFT's `save_pretrained`"
        )
    return found["module"], part


def _matrices(
    module: str,
    source: str,
    names: Mapping[str, str],
    place: Placement,
    stored: Mapping[str, _Stored],
    config: PeftConfig,
    file: Path,
) -> _Matrices:
    """The matrices of a module. Raises AdapterError if one is missing, or does not have the shape that it must have."""
    rows, columns = _rows_and_columns(place)
    rank = config.rank_of(module)
    if not 1 <= rank <= _MAX_RANK:
        raise AdapterError(f"{file}: {module} has the rank {rank}; quire loads adapters of ranks 1 to {_MAX_RANK}")
    wanted = {_A: (rank, columns), _B: (rows, rank)} | ({_BIAS: (rows,)} if config.has_bias else {})
    for part, shape in wanted.items():
        if part not in names:
            raise AdapterError(f"{file}: {module} has no {part}; save the adapter again")
        if stored[names[part]].shape != shape:
            raise AdapterError(
                f"{file}: {names[part]}: expected shape {shape} for the rank {rank} of {CONFIG_FILE} and a weight "
                f"({rows}, {columns}) of the model, found {stored[names[part]].shape}; is it of another model?"
            )
    if _BIAS in names and not config.has_bias:
        raise AdapterError(f"{file} has {names[_BIAS]}, but {CONFIG_FILE} has no lora_bias; save the adapter again")
    return _Matrices(module, source, names, place, rank, config.scale_of(module))


def _rows_and_columns(place: Placement) -> tuple[int, int]:
    """Those of a weight. A matrix that a checkpoint stores transposed has not been transposed by PEFT."""
    rows, columns = place.shape[::-1] if place.transposed else place.shape
    return rows, columns


def _converted(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, file: Path) -> Tensor:
    """A tensor in another type. Raises AdapterError if a number is not finite."""
    converted = tensors[name].to(dtype)
    if is_finite(converted):
        return converted
    if is_finite(tensors[name]):
        raise AdapterError(f"{file}: {name} has numbers beyond the range of {dtype}; use --dtype bfloat16")
    raise AdapterError(f"{file}: {name} has numbers that are NaN or infinite; train the adapter again")


def _shape(model: ModelDescription, name: str) -> tuple[int, ...]:
    """The shape of a tensor of the checkpoint; () if it has no plain one of this name."""
    stored = model.checkpoint.tensors.get(name)
    return () if stored is None or not stored.is_float else stored.shape


def _compare_copies(matrices: _Matrices, tensors: Mapping[str, Tensor], model: ModelDescription, file: Path) -> None:
    """Raise AdapterError if a copy of a tensor of the model has other numbers."""
    for part in _COPIES:
        if name := matrices.names.get(part):
            ((_, own),) = model.checkpoint.read([matrices.source + part.removeprefix("base_layer")])
            if not torch.equal(own.to(tensors[name].dtype), tensors[name]):
                raise _other_copy(name, file)


def _other_copy(name: str, file: Path) -> AdapterError:
    return AdapterError(
        f"{file}: {name} is not equal to the weight of the model; if it was not trained, save the adapter with "
        "`save_pretrained(..., save_embedding_layers=False)`"
    )


def begin_digest(config: bytes, num_bytes: int) -> "hashlib._Hash":
    """The digest of an adapter before its tensors, which have `num_bytes` bytes."""
    return hashlib.sha256(len(config).to_bytes(8, "little") + config + num_bytes.to_bytes(8, "little"))


def _files(folder: Path, root: Path | None) -> tuple[Path, Path]:
    """The config and the tensors of an adapter, links followed. Raises AdapterError."""
    if not folder.is_dir():
        raise AdapterError(f"there is no adapter folder {str(folder)!r}; give the path of a folder that PEFT has saved")
    if not (folder / TENSORS_FILE).exists() and (folder / "adapter_model.bin").exists():
        raise AdapterError(
            f"{folder} has its matrices only as adapter_model.bin, which can run code; load it with PEFT and save it "
            "with `save_pretrained`"
        )
    found = []
    for path in (folder / CONFIG_FILE, folder / TENSORS_FILE):
        try:
            resolved, allowed = path.resolve(strict=True), (folder if root is None else root).resolve(strict=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise AdapterError(
                f"{folder} has no {path.name}; is it the folder of an adapter in PEFT's format?"
            ) from error
        if not resolved.is_relative_to(allowed):
            raise AdapterError(f"{path} is a link that leaves {allowed}; copy the file into the folder")
        found.append(resolved)
    return found[0], found[1]


@contextmanager
def _opened(file: Path, max_bytes: int) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its bytes. Raises AdapterError if it is none, is larger than `max_bytes` or cannot be read."""
    try:
        with open(file, "rb", opener=_open_at_once) as opened:
            info = os.fstat(opened.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise AdapterError(f"{file} is not a file; save the adapter again")
            if info.st_size > max_bytes:
                raise AdapterError(f"{file} has {info.st_size} bytes; the most is {max_bytes}")
            yield opened, info.st_size
    except OSError as error:
        raise AdapterError(f"{file} cannot be read ({error}); change its permissions, or copy it again") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without following a link or waiting for a writer of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _read(file: Path, max_bytes: int) -> bytes:
    """The bytes of a file. Raises AdapterError as `_opened` does."""
    with _opened(file, max_bytes) as (opened, size):
        data = opened.read(size + 1)
    if len(data) != size:
        raise _changed(file)
    return data


def _changed(file: Path) -> AdapterError:
    return AdapterError(f"{file} changed while it was read; load it again")

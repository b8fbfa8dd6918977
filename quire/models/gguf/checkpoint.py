"""A GGUF file as a Checkpoint, with Hugging Face's names, shapes and fields."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.contract import QuantizedRows, Scheme
from quire.models.checkpoint import StoredTensor
from quire.models.gguf.config import GgufInfo, hf_config
from quire.models.gguf.names import TensorSource, tensor_sources, transposed
from quire.models.gguf.quants import dequantize, quantized_rows
from quire.models.gguf.reader import Metadata, TensorEntry, read_header
from quire.quant.schemes import convert

# name in tokenizer_config.json -> key of the file
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
)
_EOS_KEYS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_SENTENCEPIECE_DEFAULTS = MappingProxyType({"bos_token": 1, "eos_token": 2, "unk_token": 0})
# tokens that end a turn; not all files list them, and llama.cpp detects them by these texts, too
_EOS_TEXTS = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"})


def special_tokens(metadata: Metadata) -> dict[str, int]:
    """Ids of special tokens by name ("eos_token"), from the file or, for SentencePiece, from its defaults.

    Raises ModelError for an id outside the vocabulary.
    """
    size = len(metadata.texts("tokenizer.ggml.tokens"))
    implied = _SENTENCEPIECE_DEFAULTS if metadata.text("tokenizer.ggml.model", "") == "llama" else {}
    found = {name: token for name, token in implied.items() if token < size}
    return found | {name: _token(metadata, key, size) for name, key in _KEYS.items() if metadata.has(key)}


def special_token_ids(metadata: Metadata) -> dict[str, int]:
    """Fields of a config.json: bos_token_id, eos_token_id, pad_token_id."""
    return {f"{name}_id": token for name, token in special_tokens(metadata).items() if name != "unk_token"}


def eos_token_ids(metadata: Metadata) -> list[int]:
    """Ids of all tokens that end an output, in ascending order."""
    texts = metadata.texts("tokenizer.ggml.tokens")
    ends = {token for name, token in special_tokens(metadata).items() if name == "eos_token"}
    ends |= {_token(metadata, key, len(texts)) for key in _EOS_KEYS if metadata.has(key)}
    return sorted(ends | {token for token, text in enumerate(texts) if text in _EOS_TEXTS})


def _token(metadata: Metadata, key: str, size: int) -> int:
    token = metadata.number(key)
    if token >= size:
        raise metadata.error(f"{key} is {token}, but there are only {size} tokens")
    return token


_EMBEDDING = "token_embd.weight"
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16"}
_SAMPLING = {  # key of the file -> name in generation_config.json
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class GgufCheckpoint:
    """A model in one GGUF file, or in shards of which `path` is one.

    The constructor raises ModelError with a remedy for files that are missing, damaged or not supported.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._entries = header.tensors
        self.metadata = Metadata(header.metadata, header.path)
        if _EMBEDDING not in self._entries:
            raise self.metadata.error(f"{_EMBEDDING} is missing; this is not a complete language model")
        facts = GgufInfo(self.metadata, frozenset(self._entries), self._entries[_EMBEDDING].shape[0], self._factors)
        ids = special_token_ids(self.metadata)
        self._config = hf_config(facts) | {"dtype": self._dtype(), **ids}
        self._sources: dict[str, TensorSource] = {}
        for name, entry in self._entries.items():
            self._sources |= dict(tensor_sources(facts, name, entry.shape))
        self._tensors = {name: self._stored(name) for name in self._sources}

    @property
    def path(self) -> Path:
        """The file, or the first of its shards."""
        return self.metadata.path

    @property
    def config(self) -> Mapping[str, object]:
        """The config.json of the model from which the file was converted."""
        return self._config

    @property
    def generation_config(self) -> Mapping[str, object]:
        """The tokens that end an output, and the file's sampling defaults."""
        found: dict[str, object] = {"eos_token_id": eos_token_ids(self.metadata)}
        for key, name in _SAMPLING.items():
            if self.metadata.has(key):
                found[name] = self.metadata.number(key) if name == "top_k" else self.metadata.real(key)
        return found

    @property
    def quant_method(self) -> str:
        """The name of the format, which has types for low-bit weights."""
        return "gguf"

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by Hugging Face name, with the shapes of a Hugging Face checkpoint."""
        return self._tensors

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the order of the file. F16 and BF16 keep their type; all others become float32."""
        wanted = [(self._source(name), name) for name in names]
        for origin, name in sorted(wanted, key=lambda pair: self._position(pair[0])):
            entry = self._entries[origin.name]
            numbers = dequantize(entry.part_data(origin.part), entry.type, _part_shape(entry, origin))
            yield name, origin.transform(numbers) if origin.transform else numbers

    def read_codes(self, schemes: Mapping[str, Scheme]) -> Iterator[tuple[str, QuantizedRows]]:
        """Yield (name, rows) in the order of the file: see Checkpoint."""
        for name in sorted(schemes, key=lambda name: self._position(self._source(name))):
            origin, scheme = self._sources[name], schemes[name]
            entry = self._entries[origin.name]
            rows = quantized_rows(entry.part_data(origin.part), entry.type, _part_shape(entry, origin))
            if origin.transform:
                rows = rows.map_rows(origin.transform)
            yield name, convert(rows, self._stored(name).scheme or scheme, scheme)

    def _source(self, name: str) -> TensorSource:
        if name not in self._sources:
            raise self.metadata.error(f"there is no tensor {name}")
        return self._sources[name]

    def _position(self, origin: TensorSource) -> tuple[str, int, int]:
        entry = self._entries[origin.name]
        return entry.path.name, entry.start, origin.part or 0

    def _stored(self, name: str) -> StoredTensor:
        origin = self._sources[name]
        entry = self._entries[origin.name]
        shape = _part_shape(entry, origin)
        if origin.transform:
            try:
                shape = tuple(origin.transform(torch.empty(shape, device="meta")).shape)
            except RuntimeError as error:
                raise self.metadata.error(f"{origin.name} of shape {shape} does not fit the number of heads") from error
        scheme = entry.type.scheme if len(shape) == 2 and origin.transform is not transposed else None
        num_bytes = entry.part_bytes(origin.part)
        return StoredTensor(entry.path, shape, entry.type.name, num_bytes, is_float=True, scheme=scheme)

    def _dtype(self) -> str:
        """Compute dtype: the type of most numbers. Quantized types count as bfloat16, which rounds less."""
        sizes: dict[str, int] = {}
        for entry in self._entries.values():
            dtype = _PLAIN_DTYPES.get(entry.type.name, "bfloat16")
            sizes[dtype] = sizes.get(dtype, 0) + entry.num_bytes // entry.type.block_bytes * entry.type.block_size
        return max(sizes, key=lambda dtype: sizes[dtype])

    def _factors(self, name: str) -> np.ndarray | None:
        entry = self._entries.get(name)
        if entry is None:
            return None
        if len(entry.shape) != 1:
            raise ModelError(f"{entry.path}: {name} must have one dimension, not {len(entry.shape)}")
        numbers: np.ndarray = dequantize(entry.part_data(None), entry.type, entry.shape).float().numpy()
        return numbers


def _part_shape(entry: TensorEntry, origin: TensorSource) -> tuple[int, ...]:
    """The shape of a tensor, or of one part of a stacked tensor."""
    return entry.shape if origin.part is None else entry.shape[1:]

"""A model's files: description, tokenizer, and a function that loads the weights.

`open_model` chooses the implementation: quire's own decoder, or transformers as a backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from quire.config import ModelImpl
from quire.errors import ModelError
from quire.kernels.contract import Kernels
from quire.models.description import UnknownArchitecture, describe
from quire.models.loading import load
from quire.models.model import Description, Model, Progress
from quire.models.sentence_transformers import EmbeddingConfig, read_folder, read_gguf
from quire.models.text_part import TextCheckpoint
from quire.tokenizer.gguf import gguf_tokenizer
from quire.tokenizer.tokenizer import Tokenizer
from quire.weights.checkpoint import Checkpoint, FolderCheckpoint
from quire.weights.gguf.checkpoint import GgufCheckpoint
from quire.weights.quantized_checkpoint import open_layers
from quire.weights.schemes import Schemes
from quire.weights.weight_cache import WeightCache


class Load(Protocol):
    """Loads the weights of a model."""

    def __call__(
        self,
        dtype: str,
        device: str,
        kernels: Kernels,
        schemes: Schemes,
        progress: Progress,
        cache: WeightCache | None = None,
    ) -> Model:
        """Load them for `kernels`, in `schemes` where those have one, through `cache` if they are on a CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelFiles:
    """A model whose description and tokenizer are read, and whose weights are not loaded."""

    description: Description
    tokenizer: Tokenizer
    load: Load
    implementation: str  # name of the implementation, and why it was chosen
    embedding: EmbeddingConfig  # how its vectors are made


def open_model(path: Path, implementation: ModelImpl, *, max_model_len: int | None) -> ModelFiles:
    """Read description and tokenizer from a folder or .gguf file.

    Raises ModelError for incomplete or damaged files, or a model that `implementation` does not support.
    """
    if path.is_file() and path.suffix == ".gguf":
        if implementation == "transformers":
            raise ModelError(
                f"{path}: transformers as a backend reads folders only; leave model_impl out, or use 'quire'"
            )
        gguf = GgufCheckpoint(path)
        return _native(gguf, gguf_tokenizer(gguf.metadata), max_model_len, partial(read_gguf, gguf.metadata))
    checkpoint = open_layers(FolderCheckpoint(path))
    tokenizer, embedding = Tokenizer.from_folder(path), partial(read_folder, path, checkpoint.config)
    if implementation == "transformers":
        return _transformers_backend(checkpoint, tokenizer, embedding, "asked for by name")
    try:
        return _native(checkpoint, tokenizer, max_model_len, embedding)
    except UnknownArchitecture as unknown:
        if implementation == "quire":
            raise
        if find_spec("transformers") is None:
            raise ModelError(
                f"{unknown}. Transformers may run it as a backend: install it with pip install -e '.[hf]' in a "
                "checkout of quire"
            ) from unknown
        reason = "quire's own decoder does not describe this architecture"
        return _transformers_backend(checkpoint, tokenizer, embedding, reason)


ReadEmbedding = Callable[[int], EmbeddingConfig]  # of the hidden size


def _embedding(read: ReadEmbedding, description: Description) -> EmbeddingConfig:
    """How vectors are made; a model with a classification head makes none."""
    hidden_size = description.hidden_size
    return read(hidden_size) if description.classification is None else EmbeddingConfig(hidden_size)


def _native(
    checkpoint: Checkpoint, tokenizer: Tokenizer, max_model_len: int | None, embedding: ReadEmbedding
) -> ModelFiles:
    description = describe(checkpoint, max_model_len=max_model_len)

    def read(
        dtype: str,
        device: str,
        kernels: Kernels,
        schemes: Schemes,
        progress: Progress,
        cache: WeightCache | None = None,
    ) -> Model:
        return load(
            description, dtype=dtype, device=device, kernels=kernels, schemes=schemes, progress=progress, cache=cache
        )

    implementation = "quire's own decoder"
    if isinstance(description.checkpoint, TextCheckpoint):
        implementation += ", text only"
    if skipped := description.skipped:
        implementation += f"; {skipped}"
    return ModelFiles(description, tokenizer, read, implementation, _embedding(embedding, description))


def _transformers_backend(
    checkpoint: Checkpoint, tokenizer: Tokenizer, embedding: ReadEmbedding, reason: str
) -> ModelFiles:
    from quire.models.transformers import describe_transformers, load_transformers  # noqa: PLC0415  (needs an optional extra)

    description = describe_transformers(checkpoint)

    def read(
        dtype: str,
        device: str,
        kernels: Kernels,
        schemes: Schemes,
        progress: Progress,
        cache: WeightCache | None = None,
    ) -> Model:
        del kernels, schemes  # transformers uses its own kernels and weight layout, and keeps weights in dtype
        if cache is not None:
            cache.report("weights    not cached, because transformers loads them")
        return load_transformers(description, dtype=dtype, device=device, progress=progress)

    return ModelFiles(
        description,
        tokenizer,
        read,
        f"transformers as a backend: {reason}; slower, without deterministic",
        _embedding(embedding, description),
    )

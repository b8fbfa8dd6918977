"""Information about a model and its engine, which the engine process sends to the front end. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from quire.config import CacheConfig, Classification, EngineOptions
from quire.models.sentence_transformers import EmbeddingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Information about a model and its engine, as plain data."""

    model_name: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    classification: Classification | None  # of its classification head; None for a language model
    generates: bool  # whether it has a head over its vocabulary
    embedding: EmbeddingConfig  # how its vectors are made
    path: str  # a folder or a .gguf file
    max_model_len: int
    vocab_size: int
    num_end_tokens: int  # end tokens of the model
    hidden_size: int
    sampling_defaults: Mapping[str, float | int]  # for parameters that a request leaves out
    options: EngineOptions  # as resolved by `prepare`
    cache: CacheConfig


def model_info_of(built: ModelInfo) -> ModelInfo:
    """A copy with the fields of ModelInfo only, for example of Built."""
    return ModelInfo(**{field.name: getattr(built, field.name) for field in fields(ModelInfo)})

"""Facts: what a front end needs to know of an engine that may run in another process. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from quire.config import CacheConfig, EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One model, and the engine that runs it, as it was set up."""

    model_name: str
    path: str  # of the model's files: a folder, or a .gguf file
    max_model_len: int
    vocab_size: int
    num_end_tokens: int  # tokens of the model that end a sequence
    hidden_size: int
    sampling_defaults: Mapping[str, float | int]  # for what a request leaves out
    options: EngineOptions  # as they were resolved
    cache: CacheConfig


def facts_of(built: Facts) -> Facts:
    """The facts alone, of what also has an engine."""
    return Facts(**{field.name: getattr(built, field.name) for field in fields(Facts)})

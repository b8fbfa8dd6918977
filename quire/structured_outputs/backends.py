"""The grammar backends by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from quire.core.constraint import Grammar
from quire.errors import ConfigError, nearest
from quire.params import StructuredOutputsParams
from quire.structured_outputs.fsm.backend import FsmBackend
from quire.structured_outputs.llguidance_backend import GuidanceBackend
from quire.structured_outputs.vocabulary import Vocabulary


class Backend(Protocol):
    """Compiles constraints to grammars. Thread-safe."""

    def check(self, params: StructuredOutputsParams) -> None:
        """Raises RequestError for a constraint that `compile` refuses with any vocabulary."""

    def compile(self, params: StructuredOutputsParams, vocabulary: Vocabulary) -> Grammar:
        """The grammar of a constraint for one vocabulary. Raises RequestError."""


_GUIDANCE = GuidanceBackend()
BACKENDS: Mapping[str, Backend] = MappingProxyType({"auto": _GUIDANCE, "llguidance": _GUIDANCE, "fsm": FsmBackend()})


def check(params: StructuredOutputsParams, backend: str = "auto") -> None:
    """Raises RequestError for a constraint that the backend refuses, ConfigError for an unknown backend."""
    _named(backend).check(params)


def compile(params: StructuredOutputsParams, vocabulary: Vocabulary, backend: str = "auto") -> Grammar:
    """The grammar of a constraint for one vocabulary. Raises RequestError and ConfigError as `check` does."""
    return _named(backend).compile(params, vocabulary)


def _named(name: str) -> Backend:
    if name not in BACKENDS:
        raise ConfigError(f"unknown grammar backend {name!r}{nearest(name, BACKENDS)}; known: {', '.join(BACKENDS)}")
    return BACKENDS[name]

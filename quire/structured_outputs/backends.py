"""The backends by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from quire.core.constraint import Grammar
from quire.errors import ConfigError, nearest
from quire.params import StructuredOutputsParams
from quire.structured_outputs.fsm.backend import FsmBackend
from quire.structured_outputs.guidance import GuidanceBackend
from quire.structured_outputs.vocabulary import Vocabulary
from quire.structured_outputs.xgrammar import XgrammarBackend


class Backend(Protocol):
    """Makes grammars of what callers ask. May be used by several threads at once."""

    def check(self, asked: StructuredOutputsParams) -> None:
        """Raises RequestError for what `compile` would refuse, with whatever vocabulary."""

    def compile(self, asked: StructuredOutputsParams, vocabulary: Vocabulary) -> Grammar:
        """Raises RequestError."""


_GUIDANCE = GuidanceBackend()
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {"auto": _GUIDANCE, "llguidance": _GUIDANCE, "xgrammar": XgrammarBackend(), "fsm": FsmBackend()}
)


def check(asked: StructuredOutputsParams, backend: str = "auto") -> None:
    """Raises RequestError for a constraint that a backend refuses, ConfigError for a backend that is not known."""
    _named(backend).check(asked)


def compile(asked: StructuredOutputsParams, vocabulary: Vocabulary, backend: str = "auto") -> Grammar:
    """A constraint for one vocabulary. Raises RequestError and ConfigError as `check` does."""
    return _named(backend).compile(asked, vocabulary)


def _named(name: str) -> Backend:
    if name not in BACKENDS:
        raise ConfigError(f"unknown grammar backend {name!r}{nearest(name, BACKENDS)}; known: {', '.join(BACKENDS)}")
    return BACKENDS[name]

"""Metadata of a GGUF file with its types checked. Knows how keys are prefixed, not what they mean. No torch here."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from quire.errors import ModelError
from quire.models.gguf.bytes_in import Value

T = TypeVar("T", int, float)
_MOST = 2**31 - 1  # no size or count of a model is larger


class Metadata:
    """All keys of one file. A key that begins with a dot is prefixed with the architecture: ".block_count".

    Raises ModelError, naming the key, for a value that is missing or of another type.
    """

    def __init__(self, values: Mapping[str, Value], place: Path) -> None:
        self._values = values
        self.place = place
        self.architecture = self.text("general.architecture")

    def error(self, message: str) -> ModelError:
        """An error that says which file it is about."""
        return ModelError(f"{self.place}: {message}")

    def has(self, key: str) -> bool:
        """Whether the file has this key."""
        return self._name(key) in self._values

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def number(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number from `least` to 2**31 - 1. One that is given for each layer has to be the same for all."""
        value = self._one(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise self._wrong(key, f"a whole number from {least} to {_MOST}", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._one(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, "a number", value)
        return float(value)

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty where there is none."""
        value = self._values.get(self._name(key), [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list of strings", value)
        return value

    def numbers(self, key: str, kind: type[T], length: int) -> list[T]:
        """A list of `length` numbers, each made a `kind`; empty where the file has none."""
        value = self._values.get(self._name(key))
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or len(value) != length:
            raise self._wrong(key, f"a list of {length} numbers", value)
        return [kind(item) for item in value.tolist()]

    def _name(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key

    def _get(self, key: str, default: Value | None) -> Value:
        value = self._values.get(self._name(key), default)
        if value is None:
            raise self.error(f"{self._name(key)} is missing; the file is incomplete, get another one")
        return value

    def _one(self, key: str, default: float | None) -> Value:
        value = self._get(key, default)
        if not isinstance(value, np.ndarray):
            return value
        if len(value) == 0 or (value != value[0]).any():
            raise self.error(f"{self._name(key)} differs between layers, which is not supported")
        one: int | float = value[0].item()
        return one

    def _wrong(self, key: str, kind: str, value: object) -> ModelError:
        shown = f"a list of {len(value)}" if isinstance(value, list | np.ndarray) else f"{value!r:.80}"
        return self.error(f"{self._name(key)} must be {kind}, not {shown}")

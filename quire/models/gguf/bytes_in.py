"""Little-endian values off the start of a file, never beyond its end. Knows nothing of what they mean.

Everything that a file can make large is bounded before anything is allocated: strings and arrays by
what is left of the file, the header as a whole by MAX_HEADER and MAX_VALUES.
"""

import struct
from mmap import mmap
from pathlib import Path

import numpy as np

from quire.errors import ModelError

MAX_HEADER = 1 << 29  # bytes; the largest vocabularies take 16 MiB
MAX_VALUES = 1 << 24  # strings and scalars; the largest vocabularies have under a million

Scalar = int | float | bool | str
Value = Scalar | list[str] | np.ndarray

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DTYPES = {
    kind: np.dtype(name)
    for kind, name in zip(
        (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12),
        ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1", "<u8", "<i8", "<f8"),
        strict=True,
    )
}


class BytesIn:
    """A position in a mapped file. All methods raise ModelError where the file does not hold what they ask."""

    def __init__(self, data: mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._end = min(len(data), MAX_HEADER)
        self._values = 0
        self.position = 0

    def error(self, message: str) -> ModelError:
        """An error that says which file it is about and what to do."""
        return ModelError(f"{self._path} is damaged or no GGUF file ({message}); download it again")

    def count(self, what: str, smallest: int) -> int:
        """A number of things of at least `smallest` bytes each, all of which have to follow."""
        value = self.unsigned("Q")
        if value * smallest > self._end - self.position:
            raise self.error(f"{value} {what} cannot fit into what is left of it")
        return value

    def unsigned(self, code: str) -> int:
        """One unsigned integer; code: struct's letter for its width."""
        return int(self._scalar(code))

    def text(self) -> str:
        """A string: its length in bytes, then UTF-8."""
        size = self.count("bytes of text", 1)
        start = self._take(size)
        try:
            return self._data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"text at byte {start} is not UTF-8") from error

    def value(self, kind: int) -> Value:
        """A metadata value of one of GGUF's kinds. Numeric arrays are views of the file."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.unsigned("I"))
        if kind not in _SCALARS:
            raise self.error(f"metadata of unknown kind {kind} at byte {self.position}")
        value = self._scalar(_SCALARS[kind])
        # a float32 is meant as its shortest decimal: 1e-06, not 9.99999997e-07
        return float(str(np.float32(value))) if kind == 6 else value

    def _array(self, kind: int) -> Value:
        if kind == _STRING:
            return [self.text() for _ in range(self.count("strings", 8))]
        if kind not in _DTYPES:
            raise self.error(f"an array of kind {kind} at byte {self.position}; arrays hold numbers or strings")
        dtype = _DTYPES[kind]
        count = self.count("array items", dtype.itemsize)
        return np.frombuffer(self._data, dtype, count, self._take(count * dtype.itemsize))

    def _scalar(self, code: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from(f"<{code}", self._data, self._take(struct.calcsize(code)))[0]
        return value

    def _take(self, size: int) -> int:
        """Where the next `size` bytes start, having gone past them."""
        self._values += 1
        if size > self._end - self.position:
            raise self.error(f"it ends, or its header does, within a value at byte {self.position}")
        if self._values > MAX_VALUES:
            raise self.error(f"its header has more than {MAX_VALUES} values")
        start = self.position
        self.position += size
        return start

"""Serialization of plain data with msgpack. numpy arrays are (dtype, shape, bytes). No pickle.

Equal values have equal bytes, so that replays can be compared byte for byte.
"""

from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
_DTYPES = frozenset({"<i4", "<i8", "<u8", "<u4", "<f4", "<f8", "|u1"})


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    raise TypeError(f"{type(value).__name__} is not plain data")


def _decode_array(kind: type, value: Any) -> Any:  # noqa: ANN401  (the type of a msgspec hook)
    if issubclass(kind, np.ndarray):
        dtype, shape, data = value
        if dtype not in _DTYPES:
            raise ValueError(f"array of dtype {dtype!r} is not allowed")
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise TypeError(f"{kind.__name__} is not plain data")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(value: object) -> bytes:
    """The msgpack bytes of a struct of this package. Raises TypeError for a value that is no plain data."""
    return _ENCODER.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """The value of type `kind` that `encode` serialized. Raises msgspec.ValidationError for data of another type."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def decoder(kind: object) -> "msgspec.msgpack.Decoder[Any]":
    """A reusable decoder for `kind` with the behaviour of `decode`."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)

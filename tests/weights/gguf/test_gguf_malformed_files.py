"""Damaged, truncated and malicious GGUF files are rejected with a reason: no crash, hang or huge allocation."""

import struct
import tracemalloc
from contextlib import suppress

import gguf
import gguf_writer as gguf_files
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ModelError
from quire.weights.gguf import reader
from quire.weights.gguf.checkpoint import GgufCheckpoint
from quire.weights.gguf.reader import read_header

VALUES = {
    "uint8": 200,
    "int8": -3,
    "uint16": 60000,
    "int16": -3000,
    "uint32": 4_000_000_000,
    "int32": -2_000_000_000,
    "uint64": 2**63,
    "int64": -(2**62),
    "float32": 0.1,
    "float64": 0.1,
    "bool": True,
    "string": "straße",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model with every kind of metadata value, as bytes, and the number of its header bytes."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in VALUES.items():
        getattr(writer, f"add_{key}")(f"test.{key}", value)
    writer.add_array("test.texts", ["a", "", "ö"])
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_array("test.reals", [0.5, 1.5])
    for key, value in {"context_length": 32, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64,
                       "attention.head_count": 2}.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    numbers = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    gguf_files.add_tensor(writer, "token_embd.weight", numbers, "Q8_0")
    gguf_files.add_tensor(writer, "blk.0.attn_q.weight", numbers, "F16")
    gguf_files.add_tensor(writer, "output_norm.weight", numbers[0])
    gguf_files.finish(writer)
    header = min(entry.start for entry in read_header(path).tensors.values())
    return path.read_bytes(), header


def open_all(path, data):
    path.write_bytes(data)
    checkpoint = GgufCheckpoint(path)
    return dict(checkpoint.read(checkpoint.tensors)), checkpoint.generation_config


def test_every_kind_of_value_reads_as_written(small, tmp_path):
    (tmp_path / "model.gguf").write_bytes(small[0])
    header = read_header(tmp_path / "model.gguf")
    for key, value in VALUES.items():
        assert header.metadata[f"test.{key}"] == value
    assert header.metadata["test.texts"] == ["a", "", "ö"]
    assert header.metadata["test.numbers"].tolist() == [1, 2, 3]
    assert header.metadata["test.reals"].tolist() == [0.5, 1.5]
    theirs = gguf.GGUFReader(tmp_path / "model.gguf")
    for tensor in theirs.tensors:
        entry = header.tensors[tensor.name]
        assert entry.type.name == tensor.tensor_type.name
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.part_data(None).tobytes() == tensor.data.tobytes()


def test_version_2_is_the_same(small, tmp_path):
    data, _ = small
    tensors, _ = open_all(tmp_path / "model.gguf", data[:4] + struct.pack("<I", 2) + data[8:])
    assert len(tensors) == 3


def test_truncated_anywhere(small, tmp_path):
    data, header = small
    for size in [*range(header), *range(header, len(data), 61), len(data) - 1]:
        with pytest.raises(ModelError, match=r"download it again|get another"):
            open_all(tmp_path / "model.gguf", data[:size])


@pytest.mark.parametrize("change", [lambda byte: byte ^ 0x80, lambda _: 0xFF])
def test_any_byte_of_the_header_may_be_wrong(small, tmp_path, change):
    data, header = small
    for position in range(header):
        damaged = bytearray(data)
        damaged[position] = change(damaged[position])
        try:
            open_all(tmp_path / "model.gguf", damaged)
        except ModelError as error:
            assert str(tmp_path) in str(error)


@given(data=st.data())
def test_headers_of_random_bytes(small, tmp_path_factory, data):
    good, header = small
    start = data.draw(st.integers(0, header))
    noise = data.draw(st.binary(max_size=64))
    with suppress(ModelError):
        open_all(tmp_path_factory.getbasetemp() / "random.gguf", good[:start] + noise + good[start + len(noise) :])


def header_of(*pieces, tensors=0, pairs=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(pieces)


def text(value, size=None):
    return struct.pack("<Q", len(value) if size is None else size) + value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
        (header_of(version=1), "of version 1; quire reads versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header_of(tensors=2**62), "4611686018427387904 tensors do not fit"),
        (header_of(pairs=2**63), "metadata pairs do not fit"),
        (header_of(text(b"k", 2**60), pairs=1, tensors=0) + bytes(64), "bytes of text do not fit"),
        (header_of(text(b"k"), struct.pack("<I", 13), pairs=1) + bytes(64), "unknown kind 13"),
        (header_of(text(b"k"), struct.pack("<IIQ", 9, 8, 2**61), pairs=1), "strings do not fit"),
        (header_of(text(b"k"), struct.pack("<IIQ", 9, 4, 2**61), pairs=1), "array items do not fit"),
        (header_of(text(b"k"), struct.pack("<IIQ", 9, 9, 1), pairs=1) + bytes(64), "an array of kind 9"),
        (header_of(text(b"k\xff"), struct.pack("<IB", 0, 1), pairs=1) + bytes(64), "is not UTF-8"),
        (header_of(*[text(b"k") + struct.pack("<IB", 0, 1)] * 2, pairs=2), "the key k twice"),
        (
            header_of(text(b"split.count"), struct.pack("<IIQ2f", 9, 6, 2, 0.5, 0.5), pairs=1),
            "split.count must be a whole number",
        ),
        (header_of(text(b"split.count"), struct.pack("<Iq", 11, -1), pairs=1), "split.count must be a whole number"),
        (
            header_of(text(b"general.alignment") + struct.pack("<II", 4, 24), pairs=1),
            "alignment must be a power of two, not 24",
        ),
    ],
)
def test_a_malicious_header_costs_no_memory(tmp_path, data, message):
    (tmp_path / "model.gguf").write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ModelError, match=message):
        read_header(tmp_path / "model.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def tensor(name=b"t", dimensions=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([tensor(dimensions=(2**62, 2**62, 2**62, 2**62))], "does not lie within the file"),
        ([tensor(offset=2**64 - 32)], "does not lie within the file"),
        ([tensor(offset=1)], "not at a multiple of 32 bytes"),
        ([tensor(dimensions=(0,))], "t is empty"),
        ([tensor(dimensions=(1,) * 5)], "t has 5 dimensions"),
        ([tensor(dimensions=(33,), kind=8)], "rows of 33 numbers, not a multiple of 32"),
        ([tensor(kind=21)], "t is of type IQ3_S; quire reads F32, F16, BF16, Q4_0.*such as Q4_K_M"),
        ([tensor(kind=99)], "t is of type 99"),
        ([tensor(), tensor()], "the tensor t twice"),
    ],
)
def test_tensors_that_are_not_there(tmp_path, entries, message):
    (tmp_path / "model.gguf").write_bytes(header_of(*entries, tensors=len(entries)) + bytes(512))
    with pytest.raises(ModelError, match=message):
        read_header(tmp_path / "model.gguf")


def test_a_header_of_endless_values_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_VALUES", 1000)
    pieces = text(b"k"), struct.pack("<IIQ", 9, 8, 1001), bytes(8 * 1001)  # empty strings
    (tmp_path / "model.gguf").write_bytes(header_of(*pieces, pairs=1))
    with pytest.raises(ModelError, match="more than 1000 values"):
        read_header(tmp_path / "model.gguf")


def test_a_header_does_not_go_on_through_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_HEADER", 1000)
    (tmp_path / "model.gguf").write_bytes(header_of(text(b"k"), struct.pack("<I", 8), text(bytes(1000)), pairs=1))
    with pytest.raises(ModelError, match="1000 bytes of text do not fit"):
        read_header(tmp_path / "model.gguf")

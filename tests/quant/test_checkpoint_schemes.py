"""Codes of a checkpoint: schemes of fused weights, conversion between schemes, GGUF files whose codes are kept."""

import gguf_writer as gguf_files
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.hub import embedded
from quire.kernels import reference
from quire.kernels.contract import INT4, INT8, PackedWeight, QuantizedRows, Scheme
from quire.kernels.reference.codes import dequantize, rows_of
from quire.models.description import describe
from quire.models.gguf.checkpoint import GgufCheckpoint
from quire.models.loading import load
from quire.models.weight_map import Placement
from quire.quant.schemes import convert, holds, schemes_of_checkpoint, widest

cpu = pytest.importorskip("quire.kernels.cpu.kernels")

HALF = torch.float16
BITS, SIZES = st.sampled_from([4, 8]), st.sampled_from([0, 8, 16, 32, 128])
TYPES = st.sampled_from([HALF, torch.float32])
SCHEMES = st.builds(Scheme, BITS, SIZES, TYPES, st.booleans())
GRIDS = SCHEMES | st.builds(lambda grid, size, dtype: Scheme(4, size, dtype, grid=grid),
                            st.sampled_from(["e2m1", "iq4_nl"]), SIZES, TYPES)  # fmt: skip


def drawn(scheme, columns, seed=0):
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << scheme.bits, (3, columns), dtype=torch.uint8, generator=draw)
    scales, offsets = torch.randn(2, 3, scheme.num_groups(columns), generator=draw).to(scheme.scale_dtype)
    return QuantizedRows(codes, scales, offsets if scheme.has_offsets else None)


@given(st.lists(GRIDS, min_size=1, max_size=4), st.integers(1, 300), st.integers(0, 99))
def test_rows_in_the_widest_scheme_have_the_same_values(schemes, columns, seed):
    wide = widest(schemes)
    for scheme in schemes:
        rows = drawn(scheme, columns, seed)
        assert torch.equal(dequantize(convert(rows, scheme, wide), wide), dequantize(rows, scheme))
        if scheme.group_size or not wide.group_size:
            assert holds(wide, scheme)


@pytest.mark.parametrize(
    ("scheme", "stored"),
    [
        (INT8, Scheme(8, 32, HALF)),  # a scale for a row does not hold scales of groups
        (INT4, Scheme(4, 32, HALF)),  # bfloat16 does not hold float16
        (Scheme(4, 32, HALF), Scheme(8, 32, HALF)),
        (Scheme(8, 32, HALF), Scheme(8, 16, HALF)),
        (Scheme(8, 32, HALF), Scheme(8, 32, HALF, has_offsets=True)),
        (Scheme(8, 32, HALF), Scheme(8, 32, torch.float32)),
        (Scheme(4, 32, HALF), Scheme(4, 32, HALF, grid="iq4_nl")),
        (Scheme(4, 32, HALF, grid="e2m1"), Scheme(4, 32, HALF, grid="iq4_nl")),
        (Scheme(8, 32, HALF), Scheme(8, 32, HALF, grid="e4m3")),
        (Scheme(8, 32, HALF, grid="e4m3"), Scheme(4, 32, HALF)),
    ],
)
def test_what_a_scheme_does_not_hold(scheme, stored):
    assert not holds(scheme, stored)
    assert holds(stored, stored)


def test_no_scheme_holds_float8_and_another_grid():
    one_scale, groups = Scheme(8, grid="e4m3"), Scheme(8, 128, HALF, grid="e4m3")
    assert widest([INT8, one_scale]) is widest([groups, INT4]) is None
    assert widest([one_scale, groups]) == Scheme(8, 128, grid="e4m3")
    places = {name: Placement((8, 32), "layers.0.attention.qkv.weight", 8 * i) for i, name in enumerate("qk")}
    assert not schemes_of_checkpoint(places, {"q": one_scale, "k": INT8})


def test_a_fused_weight_has_the_widest_scheme_of_its_tensors_or_none():
    four, six = Scheme(4, 32, HALF, has_offsets=True), Scheme(8, 16, HALF)
    places = {
        "q": Placement((8, 32), "layers.0.attention.qkv.weight"),
        "v": Placement((8, 32), "layers.0.attention.qkv.weight", 8),
        "o": Placement((8, 32), "layers.0.attention.o.weight"),
        "gate": Placement((8, 32), "layers.0.mlp.up.weight"),
        "up": Placement((8, 32), "layers.0.mlp.up.weight", 8),
        "down": Placement((8, 32), "layers.0.mlp.down.weight", transposed=True),
        "norm": Placement((32,), "norm.weight"),
        "router": Placement((8, 32), "layers.0.mlp.router.weight"),
        "head": Placement((8, 32), "head.weight"),
    }
    stored = dict.fromkeys(places, four) | {"v": six, "up": None}
    assert schemes_of_checkpoint(places, stored) == {
        "layers.0.attention.qkv.weight": Scheme(8, 16, HALF, has_offsets=True),
        "layers.0.attention.o.weight": four,
        "head.weight": four,
    }


@pytest.mark.parametrize("file_type", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("kind", ["llama-gqa-tied", "mixtral-window", "qwen3-gqa", "gpt2"])
def test_weights_of_a_gguf_file_keep_their_codes(saved, tmp_path, kind, file_type):
    description = describe(
        GgufCheckpoint(gguf_files.write_gguf(saved(kind)[0], tmp_path / "model.gguf", kind=file_type))
    )
    schemes = description.schemes(None)
    plain = load(description, dtype="float32")
    model = load(description, dtype="float32", schemes=schemes)
    assert schemes or kind == "gpt2"  # whose file has transposed matrices
    for path, scheme in schemes.items():
        module, _, name = path.rpartition(".")
        weight, expected = (getattr(some.get_submodule(module), name) for some in (model, plain))
        assert isinstance(weight, PackedWeight)
        parts = (
            [(weight, expected)] if expected.dim() == 2 else [(weight[i], expected[i]) for i in range(len(expected))]
        )
        for one, numbers in parts:
            found = dequantize(rows_of(one), scheme)
            assert torch.allclose(found, numbers, rtol=0, atol=2**-9 * float(numbers.abs().max()))
            assert file_type == "Q4_1" or torch.equal(found, numbers)


def test_the_embedded_model_from_a_gguf_file(tmp_path):
    path = gguf_files.write_gguf(embedded.folder(), tmp_path / "model.gguf", kind="Q8_0")
    prompts, answers = ["The capital of France is", "Two and two are"], {}
    for quantization in (None, "gguf", "none"):
        lines = []
        llm = LLM(str(path), quantization=quantization, memory="256MiB", max_model_len=256, report=lines.append)
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
        answers[quantization] = [output.outputs[0].text for output in outputs]
        kept = [line for line in lines if line.startswith("weights    as stored: ")]
        assert len(kept) == (quantization != "none")
        llm.close()
    assert answers[None] == answers["gguf"] == answers["none"]
    del lines[:]
    LLM(str(path), kernels="reference", memory="256MiB", max_model_len=256, report=lines.append).close()
    assert any(line.startswith("weights    expanded from low bits to bfloat16: reference: ") for line in lines)
    with pytest.raises(ConfigError, match=r"'awq' names the layout of a checkpoint, but .* has the layout 'gguf'"):
        LLM(str(path), quantization="awq", report=lines.append)


def test_both_kernel_modules_multiply_the_codes_of_a_file(saved, tmp_path):
    path = gguf_files.write_gguf(saved("qwen3-gqa")[0], tmp_path / "model.gguf", kind="Q4_1")
    description = describe(GgufCheckpoint(path))
    x, found = torch.randn(3, description.hidden_size), []
    for kernels in (reference, cpu):
        model = load(description, dtype="float32", kernels=kernels, schemes=description.schemes(None))
        found.append(kernels.linear(x, model.layers[0].attention.qkv.weight))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)
    assert INT8 not in description.schemes(None).values()

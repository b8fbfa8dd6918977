"""Codes of a checkpoint: schemes of fused weights, conversion between schemes, GGUF files whose codes are kept."""

from dataclasses import replace

import gguf_writer as gguf_files
import pytest
import random_checkpoints
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.hub import embedded
from quire.kernels import reference
from quire.kernels.contract import INT4, INT8, PackedWeight, QuantizedRows, Scheme
from quire.kernels.reference.codes import dequantize, rows_of, scales_of
from quire.models.description import describe
from quire.models.loading import load
from quire.weights.gguf.checkpoint import GgufCheckpoint
from quire.weights.placement import Placement
from quire.weights.schemes import convert, holds, schemes_of_checkpoint, simpler, widest

cpu = pytest.importorskip("quire.kernels.cpu.kernels")

HALF = torch.float16
BITS, SIZES = st.sampled_from([4, 6, 8]), st.sampled_from([0, 8, 16, 32, 128])
TYPES = st.sampled_from([HALF, torch.float32])
SCHEMES = st.builds(Scheme, BITS, SIZES, TYPES, st.booleans())
GRIDS = SCHEMES | st.builds(lambda grid, size, dtype: Scheme(4, size, dtype, grid=grid),
                            st.sampled_from(["e2m1", "iq4_nl"]), SIZES, TYPES)  # fmt: skip
FACTORED = st.builds(lambda bits, size, offsets: Scheme(bits, size, HALF, offsets, has_factors=True),
                     st.sampled_from([4, 6]), st.sampled_from([16, 32]), st.booleans())  # fmt: skip
XS = Scheme(4, 32, HALF, grid="iq4_nl", has_factors=True)


def drawn(scheme, columns, seed=0):
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << scheme.bits, (3, columns), dtype=torch.uint8, generator=draw)
    if scheme.has_factors:
        shape = 2, 3, scheme.num_groups(columns)
        scales, offsets = torch.randint(-128, 128, shape, dtype=torch.int8, generator=draw)
        factors = torch.randn(3, scheme.num_factors(columns), 1 + scheme.has_offsets, generator=draw).to(HALF)
        return QuantizedRows(codes, scales, offsets if scheme.has_offsets else None, factors)
    scales, offsets = torch.randn(2, 3, scheme.num_groups(columns), generator=draw).to(scheme.scale_dtype)
    return QuantizedRows(codes, scales, offsets if scheme.has_offsets else None)


@given(
    st.lists(GRIDS, min_size=1, max_size=4) | st.lists(FACTORED, min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(0, 99),
)
def test_rows_in_the_widest_scheme_have_the_same_values(schemes, columns, seed):
    wide = widest(schemes)
    assert wide.has_factors == schemes[0].has_factors
    for scheme in schemes:
        rows = drawn(scheme, columns, seed)
        assert torch.equal(dequantize(convert(rows, scheme, wide), wide), dequantize(rows, scheme))
        if scheme.group_size or not wide.group_size:
            assert holds(wide, scheme)


@given(FACTORED | st.just(XS), st.integers(1, 600), st.integers(0, 99))
def test_simpler_schemes_hold_values_whose_scales_are_rounded_once(stored, columns, seed):
    rows, places = drawn(stored, columns, seed), simpler(stored)
    expected = dequantize(rows, stored)
    for scheme in places:
        assert holds(scheme, stored) and not scheme.has_factors and not holds(stored, scheme)
        found = convert(rows, stored, scheme)
        assert found.factors is None
        scales, offsets = scales_of(found, scheme)
        width = 64 * scales.abs() + (0 if offsets is None else offsets.abs())
        error = (dequantize(found, scheme) - expected).abs()
        assert (error <= (2**-10 * width).repeat_interleave(stored.group_size, 1)[:, :columns] + 2**-24 * 64).all()
        assert stored != XS or torch.equal(dequantize(found, scheme), expected)


@given(st.lists(FACTORED | st.just(XS) | st.just(Scheme(4, 32, HALF)), min_size=1, max_size=3))
def test_scales_keep_factors_only_if_all_have_some(schemes):
    kinds = {(scheme.grid, scheme.has_factors) for scheme in schemes}
    wide = widest(schemes)
    assert wide.has_factors == (kinds in ({("int", True)}, {("iq4_nl", True)}))
    assert all(holds(wide, scheme) for scheme in schemes if wide.has_factors or wide.scale_dtype != HALF)


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
def test_a_scheme_does_not_hold_another_precision_group_size_or_grid(scheme, stored):
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


def assert_codes_are_kept(file, *, rounds=False):
    """Asserts that weights in the schemes of a GGUF file have its numbers. Returns the schemes."""
    description = describe(GgufCheckpoint(file))
    schemes = description.schemes(None)
    plain = load(description, dtype="float32")
    model = load(description, dtype="float32", schemes=schemes)
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
            assert rounds or torch.equal(found, numbers)
    return schemes


@pytest.mark.parametrize("file_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("kind", ["llama-gqa-tied", "mixtral-window", "qwen3-gqa", "gpt2"])
def test_weights_of_a_gguf_file_keep_their_codes(saved, tmp_path, kind, file_type):
    file = gguf_files.write_gguf(saved(kind)[0], tmp_path / "model.gguf", kind=file_type)
    schemes = assert_codes_are_kept(file, rounds=file_type == "Q4_1")
    assert schemes or kind == "gpt2"  # whose file has transposed matrices


@pytest.mark.parametrize(
    ("kind", "file_type", "names"),
    [
        ("smollm3", "Q4_0", ("attention.qkv.weight", "attention.o.weight", "mlp.up.weight", "mlp.down.weight")),
        ("glm4", "Q5_0", ("attention.qkv.weight", "attention.o.weight", "mlp.up.weight", "mlp.down.weight")),
        ("glm4-moe", "Q8_0", ("attention.qkv.weight", "mlp.up", "mlp.down", "mlp.shared.up.weight")),
        ("minimax-m2", "Q5_1", ("attention.qkv.weight", "mlp.up", "mlp.down")),
        ("granite-moe", "MXFP4", ("attention.qkv.weight", "mlp.up", "mlp.down")),
        ("granite-moe-shared", "Q8_0", ("mlp.up", "mlp.down", "mlp.shared.up.weight")),
    ],
)
def test_weights_of_other_gguf_architectures_keep_their_codes(saved, tmp_path, kind, file_type, names):
    file = gguf_files.write_gguf(saved(kind)[0], tmp_path / "model.gguf", kind=file_type)
    assert {f"layers.1.{name}" for name in names} <= assert_codes_are_kept(file).keys()


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "qwen3-gqa", "mixtral-window", "olmoe"])
def test_k_quants_keep_their_factors(tmp_path, kind):
    random_checkpoints.save(tmp_path, kind, hidden_size=256, intermediate_size=512, head_dim=64)
    file = gguf_files.write_gguf(tmp_path, tmp_path / "model.gguf", kind="Q4_K_M")
    schemes = assert_codes_are_kept(file)
    q4_k, q6_k = Scheme(4, 32, HALF, has_offsets=True, has_factors=True), Scheme(6, 16, HALF, has_factors=True)
    down = "mlp.down" if kind in ("mixtral-window", "olmoe") else "mlp.down.weight"
    assert schemes["layers.0.attention.qkv.weight"] == replace(q6_k, has_offsets=True)
    assert (schemes["layers.0.attention.o.weight"], schemes[f"layers.0.{down}"]) == (q4_k, q6_k)
    description = describe(GgufCheckpoint(file))
    plain, model = (load(description, dtype="float32", schemes=some, kernels=cpu) for some in ({}, schemes))
    for path in ("layers.0.attention.qkv.weight", "layers.1.attention.o.weight", "embed.weight"):
        module, _, name = path.rpartition(".")
        ids = torch.arange(30)
        found, expected = (cpu.embed(ids, getattr(some.get_submodule(module), name)) for some in (model, plain))
        assert torch.equal(found, expected)


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

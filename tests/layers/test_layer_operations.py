"""Layer functions against float64 loops, and in float16 and bfloat16."""

import math

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels import choose as choose_module
from quire.kernels.choose import Candidate, choose, unsupported_reason, usable_device
from quire.kernels.contract import ACTIVATIONS, Requirements
from quire.kernels.cpu import EXTENSION
from quire.kernels.cpu.deterministic import CPU_DETERMINISTIC as cpu_deterministic
from quire.kernels.cpu.kernels import CPU as cpu_kernels
from quire.kernels.deterministic import DETERMINISTIC as deterministic
from quire.kernels.reference import REFERENCE as reference
from quire.kernels.reference import rotation
from quire.kernels.reference.rowwise import gate, rotary
from quire.layers.rope import Rope

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@dtypes
def test_rotary_turns_each_pair_by_its_angle(dtype):
    torch.manual_seed(0)
    q, k = torch.randn(5, 3, 8).to(dtype), torch.randn(5, 1, 8).to(dtype)
    angles = torch.randn(5, 4)
    for x, turned in zip((q, k), rotary(q, k, angles.cos(), angles.sin()), strict=True):
        assert turned.dtype == dtype
        for t in range(5):
            for head in range(x.shape[1]):
                for i in range(4):
                    pair = complex(x[t, head, i], x[t, head, i + 4]) * complex(
                        math.cos(angles[t, i]), math.sin(angles[t, i])
                    )
                    found = complex(turned[t, head, i], turned[t, head, i + 4])
                    assert abs(found - pair) < TOLERANCE[dtype]


@pytest.mark.parametrize("dim", [6, 10, 22, 128])
def test_a_position_is_rotated_alike_in_any_company(dim):
    rope = Rope(dim, 10000.0)
    positions = torch.arange(77) * 113
    cos, sin = rotation(positions, rope.frequencies(), rope.magnitude)
    for index in range(77):
        alone = rotation(positions[index : index + 1], rope.frequencies(), rope.magnitude)
        assert torch.equal(alone[0][0], cos[index])
        assert torch.equal(alone[1][0], sin[index])
        angles = [index * 113 / 10000.0 ** (2 * i / dim) for i in range(dim // 2)]
        torch.testing.assert_close(cos[index], torch.tensor([math.cos(x) for x in angles]), atol=2e-3, rtol=0)


@dtypes
def test_norms(dtype):
    torch.manual_seed(1)
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((6, 10), (6, 10), (10,)))

    def expected(values):
        rows = [[float(value) for value in row] for row in values]
        roots = [math.sqrt(sum(value * value for value in row) / 10 + 1e-3) for row in rows]
        return torch.tensor(
            [
                [v / root * float(w) for v, w in zip(row, weight, strict=True)]
                for row, root in zip(rows, roots, strict=True)
            ]
        )

    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-3).float(), expected(x), atol=TOLERANCE[dtype], rtol=0)
    kept = x.clone(), residual.clone()
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-3)
    assert normed.dtype == total.dtype == dtype
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.float(), expected(total), atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_a_norm_of_large_half_precision_values_does_not_overflow():
    x = torch.full((1, 8), 3e4, dtype=torch.float16)
    assert reference.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6).tolist() == [[1.0] * 8]


@dtypes
def test_only_the_leading_dimensions_are_rotated_where_there_are_fewer_angles(dtype):
    q, k = torch.randn(5, 3, 8).to(dtype), torch.randn(5, 1, 8).to(dtype)
    angles = torch.randn(5, 2)
    cos, sin = angles.cos(), angles.sin()
    for x, turned in zip((q, k), rotary(q, k, cos, sin), strict=True):
        assert torch.equal(turned[..., 4:], x[..., 4:])
        alone, _ = rotary(x[..., :4].contiguous(), k[..., :4].contiguous(), cos, sin)
        assert torch.equal(turned[..., :4], alone)


def test_a_weight_in_float32_keeps_its_digits_beside_short_types():
    x = torch.randn(6, 10).bfloat16()
    weight = torch.rand(10) + 1 / 3
    found = reference.rms_norm(x, weight, 1e-3)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, reference.rms_norm(x.float(), weight, 1e-3).bfloat16())


@dtypes
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(dtype, each, biased):
    torch.manual_seed(3)
    shape = (3, 10) if each else (10,)
    x, weight, bias = torch.randn(4, 3, 10).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    found = reference.layer_norm(x, weight, bias if biased else None, 1e-3)
    assert found.dtype == dtype
    for token in range(4):
        for head in range(3):
            row = x[token, head].tolist()
            w, b = ((y[head] if each else y).tolist() for y in (weight, bias))
            mean = sum(row) / 10
            root = math.sqrt(sum((value - mean) ** 2 for value in row) / 10 + 1e-3)
            expected = [(value - mean) / root * w[i] + biased * b[i] for i, value in enumerate(row)]
            torch.testing.assert_close(
                found[token, head].float(), torch.tensor(expected), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
            )


ORACLES = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "softplus": lambda x: math.log1p(math.exp(x)),
}


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_alone_and_as_gates(dtype, activation):
    torch.manual_seed(2)
    x = torch.randn(4, 12).to(dtype)
    kept = x.clone()
    gated, alone = gate(x, activation), reference.activate(x, activation)
    assert torch.equal(x, kept)
    for row, found, plain in zip(x.tolist(), gated.tolist(), alone.tolist(), strict=True):
        for first, second, value in zip(row[:6], row[6:], found, strict=True):
            assert abs(value - ORACLES[activation](first) * second) < 2 * TOLERANCE[dtype]
        for first, value in zip(row, plain, strict=True):
            assert abs(value - ORACLES[activation](first)) < 2 * TOLERANCE[dtype]


@dtypes
def test_experts_equal_a_loop_over_tokens(dtype):
    torch.manual_seed(4)
    x, up, down = (torch.randn(shape).to(dtype) for shape in ((9, 8), (5, 12, 8), (5, 8, 6)))
    ids = torch.stack([torch.randperm(4)[:3] for _ in range(9)])  # no token picks expert 4
    weights = torch.rand(9, 3)
    found = reference.experts(x, ids, weights, up / 4, down / 4, "silu")
    assert found.dtype == dtype
    for token in range(9):
        expected = torch.zeros(8)
        for expert, weight in zip(ids[token], weights[token], strict=True):
            first, second = ((up[expert] / 4).float() @ x[token].float()).chunk(2)
            expected += weight * ((down[expert] / 4).float() @ (torch.nn.functional.silu(first) * second))
        torch.testing.assert_close(found[token].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def demands(device="cpu", **others):
    usual = {"dtype": "float32", "kv_dtype": "float32", "block_size": 16, "head_dims": (32, 64)}
    return Requirements(torch.device(device), **{**usual, **others})


def module(kernels, strict=None, about="of a test"):
    return lambda: Candidate(kernels, kernels if strict is None else strict, about)


@pytest.fixture
def cpu():
    """The CPU kernels, if they are built."""
    if EXTENSION is not None:
        pytest.skip(EXTENSION)
    return cpu_kernels


def test_the_reference_is_chosen_by_its_name_and_for_what_nothing_else_can():
    assert choose("reference", demands()) == (reference, deterministic, "reference (plain torch): asked for by name")
    for demand in ({"dtype": "float16"}, {"kv_dtype": "bfloat16"}, {"block_size": 8}, {"head_dims": (64, 640)}):
        chosen = choose("auto", demands(**demand))
        assert chosen[:2] == (reference, deterministic)
        assert chosen.reason.startswith("reference (plain torch): the fastest that runs on cpu; not cpu: ")


def test_the_cpu_kernels_are_chosen_by_name_and_as_the_fastest(cpu):
    for name, why in (("auto", "the fastest that runs on cpu"), ("cpu", "asked for by name")):
        chosen = choose(name, demands())
        assert chosen.kernels is cpu
        assert chosen.kernels.new_step_capture() is not chosen.kernels.new_step_capture()  # each holds memory
        assert chosen.deterministic is cpu_deterministic
        assert chosen.deterministic.new_step_capture() is None
        assert chosen.reason.startswith("cpu (")
        assert chosen.reason.endswith(f" build): {why}")


@pytest.mark.parametrize(
    ("demand", "why"),
    [
        ({"dtype": "float16"}, "computes in float32 and bfloat16, not in float16"),
        ({"kv_dtype": "bfloat16"}, "keeps keys and values in float32, fp8_e4m3, int8, int4, not in bfloat16"),
        ({"block_size": 24}, "block_size 24 is not a multiple of 16"),
        ({"head_dims": (256, 513)}, "heads of 513 are larger than 512"),
        ({"device": "meta"}, "runs on CPUs, not on meta"),
    ],
)
def test_the_cpu_kernels_say_what_they_cannot_do(cpu, demand, why):
    assert why in cpu.unsupported_reason(demands(**demand))
    with pytest.raises(ConfigError, match=f"no kernels for .*; tried cpu: .*{why}"):
        choose("cpu", demands(**demand))


def test_without_the_extension_auto_goes_on_and_the_name_is_refused(monkeypatch):
    monkeypatch.setattr(choose_module, "EXTENSION", "its extension cannot be loaded (no such file)")
    chosen = choose("auto", demands())
    assert chosen.kernels is reference
    assert "; not cpu: its extension cannot be loaded (no such file); not triton: " in chosen.reason
    with pytest.raises(ConfigError, match=r"no kernels for float32 on cpu; tried cpu: its extension cannot be loaded"):
        choose("cpu", demands())
    assert unsupported_reason("cpu", demands()) == "its extension cannot be loaded (no such file)"
    assert unsupported_reason("reference", demands()) is None


def test_unknown_names_and_devices_are_refused():
    with pytest.raises(ConfigError, match=r"did you mean 'reference'\?\); known: auto, cpu, triton, reference"):
        choose("refrence", demands())
    with pytest.raises(ConfigError, match="device 'gpu' cannot be used"):
        usable_device("gpu")
    assert usable_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["flashinfer", "FlashInfer", "flash-attn"])
def test_kernels_that_other_engines_have_are_refused_with_what_to_use(name):
    with pytest.raises(ConfigError, match=f"quire has no kernels of {name.lower()}.* use 'triton'.* or 'auto'"):
        choose(name, demands())
    with pytest.raises(ConfigError, match="plain torch is called 'reference' here"):
        choose("torch", demands())


def test_a_gpu_without_triton_gets_the_reference_with_the_reason_and_the_name_is_refused(monkeypatch):
    monkeypatch.setattr(choose_module, "find_spec", lambda name: None)
    gpu = demands(device="cuda")
    chosen = choose("auto", gpu)
    assert chosen[:2] == (reference, deterministic)
    assert "the fastest that runs on cuda; not cpu: " in chosen.reason
    assert chosen.reason.endswith("; not triton: the package triton is not installed")
    with pytest.raises(ConfigError, match="no kernels for float32 on cuda; tried triton: the package triton is not"):
        choose("triton", gpu)


def test_the_name_of_a_module_that_is_asked_for_is_never_that_of_another():
    all_demands = [{}, {"dtype": "float16"}, {"kv_dtype": "int8"}, {"block_size": 24}, {"head_dims": (64, 640)}]
    for demand in [*all_demands, {"device": "meta"}]:
        for name in choose_module.MODULES:
            try:
                chosen = choose(name, demands(**demand))
            except ConfigError as error:
                assert f"tried {name}: " in str(error)
            else:
                assert name == chosen.kernels.NAME and chosen.reason.startswith(f"{name} (")
                assert chosen.reason.endswith("asked for by name")


class Unfit:
    NAME = "unfit"

    def unsupported_reason(self, requirements):
        return f"needs a quantum device, not {requirements.device}"


def test_the_choice_of_kernels_reports_why_others_do_not_fit(monkeypatch):
    modules = {"unfit": module(Unfit()), "reference": module(reference, deterministic)}
    monkeypatch.setattr(choose_module, "MODULES", modules)
    why = "unfit: needs a quantum device, not cpu"
    with pytest.raises(ConfigError, match=f"no kernels for float32 on cpu; tried {why}$"):
        choose("unfit", demands())
    chosen = choose("auto", demands())
    assert chosen[:2] == (reference, deterministic)
    assert chosen.reason == f"reference (of a test): the fastest that runs on cpu; not {why}"
    monkeypatch.setattr(choose_module, "MODULES", {"unfit": module(Unfit()), "other": module(Unfit())})
    with pytest.raises(ConfigError, match=r"tried unfit: needs .*, not cpu; other: needs .*, not cpu$"):
        choose("auto", demands())

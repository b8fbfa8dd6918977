"""The small functions of a layer against loops in float64, and in the two short types."""

import math

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels import choose as choose_module
from quire.kernels import reference
from quire.kernels.choose import choose

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@dtypes
def test_rotary_turns_each_pair_by_its_angle(dtype):
    torch.manual_seed(0)
    q, k = torch.randn(5, 3, 8).to(dtype), torch.randn(5, 1, 8).to(dtype)
    angles = torch.randn(5, 4)
    for x, turned in zip((q, k), reference.rotary(q, k, angles.cos(), angles.sin()), strict=True):
        assert turned.dtype == dtype
        for t in range(5):
            for head in range(x.shape[1]):
                for i in range(4):
                    pair = complex(x[t, head, i], x[t, head, i + 4]) * complex(
                        math.cos(angles[t, i]), math.sin(angles[t, i])
                    )
                    found = complex(turned[t, head, i], turned[t, head, i + 4])
                    assert abs(found - pair) < TOLERANCE[dtype]


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
def test_silu_and_mul(dtype):
    torch.manual_seed(2)
    x = torch.randn(4, 12).to(dtype)
    out = reference.silu_and_mul(x)
    for row, found in zip(x.tolist(), out.tolist(), strict=True):
        for gate, up, value in zip(row[:6], row[6:], found, strict=True):
            assert abs(value - gate / (1 + math.exp(-gate)) * up) < TOLERANCE[dtype]


def test_auto_and_the_name_choose_the_reference_and_say_why():
    assert choose("auto", "cpu") == (reference, "reference: the fastest that runs on cpu")
    assert choose("reference", "cpu") == (reference, "reference: asked for by name, runs on cpu")


def test_unknown_names_and_devices_are_refused():
    with pytest.raises(ConfigError, match=r"did you mean 'reference'\?\); known: auto, reference"):
        choose("refrence", "cpu")
    with pytest.raises(ConfigError, match="device 'gpu' cannot be used"):
        choose("auto", "gpu")


class Unfit:
    NAME = "unfit"

    def refusal(self, device):
        return f"needs a quantum device, not {device}"


def test_refusals_are_told(monkeypatch):
    monkeypatch.setattr(choose_module, "MODULES", {"unfit": Unfit(), "reference": reference})
    with pytest.raises(ConfigError, match="no kernels for cpu; tried unfit: needs a quantum device, not cpu"):
        choose("unfit", "cpu")
    kernels, reason = choose("auto", "cpu")
    assert kernels is reference
    assert reason.endswith("; not unfit: needs a quantum device, not cpu")

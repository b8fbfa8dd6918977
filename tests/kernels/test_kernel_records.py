"""Kernel modules as records: all have the functions of the contract, and one that lacks a function gets its base's."""

import inspect
from importlib.util import find_spec

import pytest
import torch

from quire.kernels.contract import CONTRACT, Kernels, new_kernels, replace_kernels
from quire.kernels.cpu import EXTENSION
from quire.kernels.deterministic import DETERMINISTIC
from quire.kernels.reference import REFERENCE

RECORDS = {"reference": REFERENCE, "deterministic": DETERMINISTIC}
if EXTENSION is None:
    from quire.kernels.cpu.deterministic import CPU_DETERMINISTIC
    from quire.kernels.cpu.kernels import CPU

    RECORDS |= {"cpu": CPU, "cpu deterministic": CPU_DETERMINISTIC}
if find_spec("triton") is not None:
    from quire.kernels.triton.deterministic import TRITON_DETERMINISTIC
    from quire.kernels.triton.kernels import TRITON

    RECORDS |= {"triton": TRITON, "triton deterministic": TRITON_DETERMINISTIC}
FUNCTIONS = [name for name in CONTRACT if name not in Kernels.__annotations__]


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_arguments_of_the_contract(record, name):
    expected = list(inspect.signature(getattr(Kernels, name)).parameters.values())[1:]  # without self
    found = inspect.signature(getattr(RECORDS[record], name)).parameters
    for parameter in expected:
        ours = found.get(parameter.name)
        assert ours is not None, f"{parameter.name} is missing"
        assert (ours.kind, ours.default) == (parameter.kind, parameter.default)
    more = [one for one in found.values() if one.name not in {parameter.name for parameter in expected}]
    assert all(one.default is not inspect.Parameter.empty for one in more)


def test_a_function_in_place_of_another_is_used_by_all_who_have_no_own():
    def twice(x, weight, bias=None):
        return 2 * REFERENCE.linear(x, weight, bias)

    def half(x, activation):
        return REFERENCE.activate(x, activation) / 2

    base = replace_kernels(REFERENCE, NAME="toy", linear=twice)
    made = replace_kernels(base, activate=half)
    x, weight = torch.randn(3, 4), torch.randn(2, 4)
    assert torch.equal(made.linear(x, weight), 2 * REFERENCE.linear(x, weight))
    assert torch.equal(made.activate(x, "relu"), x.clamp(min=0) / 2)
    assert made.embed is REFERENCE.embed
    assert (base.activate, made.NAME, REFERENCE.NAME) == (REFERENCE.activate, "toy", "reference")


def test_names_that_are_missing_or_unknown_are_refused():
    with pytest.raises(TypeError, match="fused_linear"):
        replace_kernels(REFERENCE, fused_linear=REFERENCE.linear)
    whole = {name: getattr(REFERENCE, name) for name in CONTRACT}
    del whole["route"], whole["embed"]
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments: 'embed' and 'route'"):
        new_kernels(**whole)
    with pytest.raises(AttributeError):
        REFERENCE.linear = None

"""Adapters of products by the CPU kernels, against float64, for every build and number of threads."""

import pytest
import torch
from cpu_kernel_builds import each_with, in_use
from low_rank_oracle import (
    CASES,
    UNFIT,
    Adapted,
    Case,
    Piece,
    assert_bytes_are_bounded,
    assert_exact,
    assert_nan_stays_alone,
    assert_near,
    assert_rows_are_independent,
    assert_same_on_low_bit_weights,
    assert_slots_change,
    assert_unfit_refused,
)

from quire.kernels.contract import FP8, INT4, INT8, MXFP4, LowRank, Scheme

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
low_rank = pytest.importorskip("quire.kernels.cpu.low_rank")
CPU = pytest.importorskip("quire.kernels.cpu.kernels").CPU
CPU_DETERMINISTIC = pytest.importorskip("quire.kernels.cpu.deterministic").CPU_DETERMINISTIC

MODULES = {"ordinary": CPU, "strict": CPU_DETERMINISTIC}
each_module = pytest.mark.parametrize("kernels", MODULES.values(), ids=MODULES)
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SCHEMES = [
    *(INT8, INT4, MXFP4, FP8, Scheme(8, 32, torch.float16), Scheme(8, 64, torch.float16, has_offsets=True)),
    *(Scheme(6, 32, torch.float16), Scheme(4, 32, torch.float16, has_offsets=True)),
]
_ALL = [Piece(0, 70, 8, 0.5), Piece(70, 30, 40, 2.0, biased=True)]
MANY = {  # rows for blocks of tile registers, of x and of the adapters
    "one adapter": Case(200, 64, 100, {1: _ALL}),
    "one of three parts of x": Case(100, 2624, 33, {1: [Piece(0, 33, 16)]}),
    "one of rank 512": Case(70, 96, 40, {1: [Piece(3, 30, 512, 0.1)]}),
    "one of a gated product": Case(100, 96, 150, {1: [Piece(0, 75, 16), Piece(75, 75, 8)]}, parts=2),
    "gate and up as one": Case(40, 96, 150, {1: [Piece(0, 150, 33, biased=True)]}, parts=2),
    "two": Case(150, 64, 100, {1: _ALL, 2: [Piece(40, 33, 5)]}),
    "seven": Case(90, 72, 100, {slot: [Piece(3 * slot, 60, 5 * slot)] for slot in range(1, 8)}),
}


@pytest.fixture(scope="module", params=each_with(1, 2))
def build(request):
    with in_use(request.param) as threads:
        yield threads


pytestmark = pytest.mark.usefixtures("build")


@each_module
@each_type
def test_products_with_adapters_are_those_of_float64(kernels, dtype):
    for case in CASES.values():
        assert_exact(kernels, case, dtype)


@each_type
@pytest.mark.parametrize(
    ("module", "name"),
    [*(("ordinary", name) for name in MANY), ("strict", "one of three parts of x"), ("strict", "seven")],
)
def test_many_rows_with_adapters_are_those_of_float64(module, dtype, name):
    adapted = Adapted(MODULES[module], MANY[name], dtype)
    every = torch.arange(adapted.case.num_rows)
    number = len(adapted.matrices)
    for slots in (every * number // len(every), every % number):  # as in prompts, and as in a decode step
        adapted.slots = slots.int() + 1
        assert_near(adapted.linear(), *adapted.exact())
        if adapted.case.parts == 2:
            assert_near(adapted.gated(), *exact_gated(adapted))


def exact_gated(adapted):
    """The gated product in float64, and a bound of its error. SiLU has slopes up to 1.1."""
    gates, values = adapted.exact()[0].chunk(2, 1)
    near, near_values = adapted.exact()[1].chunk(2, 1)
    gated = gates * gates.sigmoid()
    rounded = (2**-7 if adapted.dtype == torch.bfloat16 else 1e-6) * (gated * values).abs()
    return gated * values, 1.1 * near * values.abs() + (gated.abs() + 1.1 * near) * near_values + rounded + 1e-6


@each_module
@each_type
def test_low_bit_products_add_the_same(kernels, dtype):
    for scheme in SCHEMES:
        assert_same_on_low_bit_weights(kernels, dtype, scheme)


@each_type
def test_strict_rows_have_the_same_bits_in_any_company(dtype):
    for case in (*CASES.values(), MANY["one adapter"]):
        assert_rows_are_independent(CPU_DETERMINISTIC, case, dtype)
    for scheme in (INT8, INT4, FP8, Scheme(8, 64, torch.float16, has_offsets=True)):
        case = CASES["gated"]._replace(inputs=64)
        assert_rows_are_independent(CPU_DETERMINISTIC, case, dtype, scheme=scheme)


@each_type
def test_strict_products_have_the_same_bits_with_other_threads(build, dtype):
    for case in (CASES["q, k and v"], MANY["one adapter"]):
        adapted = Adapted(CPU_DETERMINISTIC, case, dtype)
        expected = adapted.linear()
        _C.set_threads(5 - build)
        found = adapted.linear()
        _C.set_threads(build)
        assert torch.equal(found, expected)


@each_module
@each_type
def test_rows_without_adapters_have_the_bits_of_products_without_an_addend(kernels, dtype):
    for case in (CASES["mixed ranks"], MANY["two"], CASES["gated"]):
        adapted = Adapted(kernels, case, dtype)
        plain = kernels.linear(adapted.x, adapted.weight, adapted.bias)
        without = adapted.slots == 0
        assert torch.equal(adapted.linear()[without], plain[without])


@each_module
@each_type
def test_nan_changes_only_the_rows_that_have_it(kernels, dtype):
    assert_nan_stays_alone(kernels, dtype)


@each_type
def test_a_slot_has_what_was_put_into_it_last(dtype):
    assert_slots_change(CPU, dtype)


@each_type
def test_packed_adapters_have_the_bytes_that_the_contract_allows(dtype):
    assert_bytes_are_bounded(CPU, dtype)
    case = Case(1, 33, 82, {1: [Piece(40, 2, 3)], 2: [Piece(1, 80, 1, biased=True)]}, parts=2)
    adapted = Adapted(CPU, case, dtype)
    tiles = [len(one.b) for matrices in adapted.table.slots[1:3] for one in matrices.matrices]
    assert tiles == [2, 6], "only those of the rows, in both parts"


@pytest.mark.parametrize("name", UNFIT)
def test_matrices_that_do_not_fit_are_refused(name):
    assert_unfit_refused(CPU, name)


@each_type
def test_rows_may_be_a_view_into_a_wider_tensor(dtype):
    adapted = Adapted(CPU, CASES["q, k and v"], dtype)
    expected = adapted.linear()
    wide = torch.full((adapted.case.num_rows, 101), torch.nan, dtype=dtype)
    view = wide[:, 7 : 7 + adapted.case.inputs]
    view.copy_(adapted.x)
    slots = torch.stack((adapted.slots, adapted.slots), 1)[:, 0]
    for x in (view, adapted.x.T.contiguous().T):
        addend = CPU.low_rank(x, adapted.table, slots, adapted.width)
        assert torch.equal(CPU.linear(x, adapted.weight, adapted.bias, addend), expected)


def test_a_plain_weight_has_the_adapters_of_the_reference():
    adapted = Adapted(CPU, CASES["gated"], torch.float32)
    found, gated = adapted.linear(), adapted.gated()
    adapted.weight = adapted.plain
    adapted.table = adapted.table_of(adapted.plain)
    assert torch.allclose(adapted.linear(), found, atol=1e-5)
    assert torch.allclose(adapted.gated(), gated, atol=1e-5)


def test_inputs_that_do_not_match_are_refused():
    adapted = Adapted(CPU, CASES["q, k and v"], torch.float32)
    for wrong in (adapted.slots.long(), adapted.slots[:-1]):
        with pytest.raises(ValueError, match="19 rows need as many slots in int32"):
            CPU.low_rank(adapted.x, adapted.table, wrong, adapted.width)
    addend = CPU.low_rank(adapted.x, adapted.table, adapted.slots, adapted.width)
    for other in (addend, torch.zeros(18, 80)):
        with pytest.raises(ValueError, match="18 rows"):
            CPU.linear(adapted.x[1:], adapted.weight, None, other)
    with pytest.raises(TypeError, match="plain tensor"):
        CPU.linear(adapted.x, adapted.plain, None, addend)
    with pytest.raises(TypeError, match="plain tensor"):
        CPU.set_adapter(adapted.table, 1, CPU.pack_adapter(adapted.plain, adapted.matrices[2]))
    one = LowRank(torch.zeros(1, 72), torch.zeros(1, 1), 0, 1.0)
    with pytest.raises(ValueError, match="at most 8"):
        CPU.pack_adapter(adapted.weight, [one._replace(start=start) for start in range(9)])
    stack = CPU.allocate_weight((3, 80, 72), torch.float32)
    with pytest.raises(ValueError, match="stacked weights"):
        CPU.pack_adapter(stack, adapted.matrices[2])

"""Recurrent states by the CPU kernels: those of the reference, and the same bits in any chunks, batches and threads."""

from dataclasses import replace

import pytest
import torch
from cpu_kernel_builds import each_with, in_use, with_pairs
from state_schedules import KINDS, Schedule, batch_of, group_of, weights_of

from quire.core.states import StateKind
from quire.kernels.reference import REFERENCE

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
CPU = pytest.importorskip("quire.kernels.cpu.kernels").CPU
CPU_DETERMINISTIC = pytest.importorskip("quire.kernels.cpu.deterministic").CPU_DETERMINISTIC
states = pytest.importorskip("quire.kernels.cpu.states")

TYPES = [torch.float32, torch.bfloat16]
DEVICE = torch.device("cpu")


@pytest.fixture(params=each_with(2))
def build(request):
    with in_use(request.param):
        yield


def recur(kernels, storage, batch, inputs, weights, layer=0):
    return kernels.recur(storage, layer, inputs, weights, kernels.plan_states(batch, storage))


def poisoned(kernels, group):
    """State blocks full of NaN, as a sequence before may have left them."""
    storage = kernels.allocate_states(group, DEVICE)
    storage.data.fill_(torch.nan)
    return storage


def assert_near(found, expected, dtype, *, exact=1e-5):
    scale = max(float(expected.abs().max()), 1e-6) if expected.numel() else 1
    relative = 2**-7 if dtype == torch.bfloat16 else exact
    torch.testing.assert_close(found.float(), expected.float(), rtol=relative, atol=(relative / 4 + exact) * scale)


def known_numbers(storage, block, layer, history, position):
    """The state of a block, and its inputs of positions that are computed."""
    kind, of_layer = storage.group.kind, storage.data[block, layer]
    tokens = kind.conv_width - 1 + min(len(history) - position, storage.group.max_pending)
    return of_layer[: storage.num_recurrent], of_layer[storage.num_recurrent :][: tokens * kind.width]


@with_pairs(1, 2, kind=list(KINDS.values()), dtype=TYPES, stored=["float32", "bfloat16"])
def test_random_steps_have_the_outputs_and_blocks_of_the_reference(seed, kind, dtype, stored):
    weights, group = weights_of(kind, dtype, seed), group_of(kind, stored)
    schedule = Schedule(group, dtype, seed, most_tokens=40)
    expected, found, layer = poisoned(REFERENCE, group), poisoned(CPU, group), seed % 2
    for _ in range(5):
        step = schedule.step()
        found.data.copy_(expected.data)  # roundings of other steps do not add up
        outputs = [
            recur(*each, step.batch, step.inputs, weights, layer) for each in ((CPU, found), (REFERENCE, expected))
        ]
        assert outputs[0].dtype == dtype
        assert_near(*outputs, dtype)
        for block, history, position in step.blocks:
            state, inputs = known_numbers(found, block, layer, history, position)
            right, right_inputs = known_numbers(expected, block, layer, history, position)
            assert torch.equal(inputs, right_inputs)
            assert_near(state, right, found.data.dtype)
    assert found.data[:, 1 - layer].isnan().all()


@with_pairs(1, 2, kind=list(KINDS.values()), dtype=TYPES)
def test_bits_depend_neither_on_chunks_nor_on_the_batch_nor_on_threads(seed, kind, dtype):
    weights, group = weights_of(kind, dtype, seed), group_of(kind)
    schedule, storage = Schedule(group, dtype, seed, most_tokens=70), poisoned(CPU, group)
    whole = poisoned(CPU, group)
    number_of_threads = 1 + seed % 3
    for _ in range(8):
        step = schedule.step()
        outputs = recur(CPU, storage, step.batch, step.inputs, weights)
        lengths = (step.batch.stops - step.batch.starts).tolist()
        _C.set_threads(number_of_threads)
        for out, history in zip(outputs.split(lengths), step.histories, strict=True):
            if len(out):
                length = len(history)
                alone = recur(CPU, whole, batch_of([(0, length, 0, 0, length)]), history, weights)
                assert torch.equal(out, alone[-len(out) :])
        for block, history, position in step.blocks:
            if position:
                recur(CPU, whole, batch_of([(0, position, 1, 0, position)]), history[:position], weights)
                expected = whole.data[1, 0, : whole.num_recurrent]
                assert torch.equal(storage.data[block, 0, : whole.num_recurrent], expected)


def test_deterministic_kernels_have_the_same_recurrence():
    assert CPU_DETERMINISTIC.recur is CPU.recur
    assert CPU_DETERMINISTIC.plan_states is CPU.plan_states


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("name", ["delta, odd sizes", "mamba2", "convolution"])
def test_chunks_without_tokens_or_without_a_block_write_nothing(name):
    kind, weights = KINDS[name], weights_of(KINDS[name])
    storage = poisoned(CPU, group_of(kind))
    chunks = [(0, 0, 2, 0, 0), (0, 1, -1, 0, 1), (7, 7, 3, 6, 7), (0, 0, -1, 0, 0), (0, 1, 24, 0, 1)]
    recur(CPU, storage, batch_of(chunks), torch.randn(2, kind.width), weights)
    assert storage.data.isnan().all()
    recur(CPU, storage, batch_of([]), torch.randn(0, kind.width), weights)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("name", ["delta", "kda", "mamba2", "convolution"])
def test_nan_of_a_sequence_stays_in_it(name):
    kind, weights, storage = KINDS[name], weights_of(KINDS[name]), poisoned(CPU, group_of(KINDS[name]))
    inputs = torch.randn(12, kind.width)
    batch = batch_of([(0, 4, 3, 0, 3), (0, 5, 1, 0, 5), (0, 3, 2, 0, 3)])
    expected = recur(CPU, storage, batch, inputs, weights)
    inputs[4:9] = torch.nan
    found = recur(CPU, storage, batch, inputs, weights)
    assert torch.equal(found[:4], expected[:4]) and torch.equal(found[9:], expected[9:])
    assert found[4:9].isnan().all()


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("name", ["delta", "kda", "mamba2", "convolution"])
def test_inputs_may_have_gaps_and_weights_another_type(name):
    kind, weights, storage = (
        KINDS[name],
        weights_of(KINDS[name], torch.bfloat16, 1),
        poisoned(CPU, group_of(KINDS[name])),
    )
    wide = torch.randn(9, kind.width + 5)
    batch = batch_of([(0, 9, 3, 0, 9)])
    expected = recur(REFERENCE, poisoned(REFERENCE, group_of(kind)), batch, wide[:, 2:-3], weights)
    for inputs in (wide[:, 2:-3], wide[:, 2:-3].t().contiguous().t()):
        assert_near(recur(CPU, storage, batch, inputs, weights), expected, torch.float32)


# ---- captured steps ----


@pytest.mark.parametrize("name", ["delta", "kda", "mamba2", "convolution"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_captured_step_has_the_bits_of_others(name, dtype):
    """Of 6 tokens in up to 6 chunks: decoding rows, drafts that stay pending, and the end of a prompt."""
    kind, weights, group = KINDS[name], weights_of(KINDS[name], dtype), group_of(KINDS[name])
    captured, plain = CPU.allocate_states(group, DEVICE), CPU.allocate_states(group, DEVICE)
    prompts = torch.randn(6 * 7, kind.width).to(dtype)
    for storage in (captured, plain):
        for layer in (0, 1):
            recur(CPU, storage, batch_of([(0, 7, block, 0, 6) for block in range(6)]), prompts, weights, layer)
    nothing = (0, 0, -1, 0, 0)
    steps = [
        [(7, 8, block, 6, 7) for block in range(6)],
        [(8, 11, 1, 7, 8), (8, 9, 0, 7, 9), nothing, (8, 10, 4, 7, 10), nothing, nothing],
        [(9, 15, 1, 8, 14), *[nothing] * 5],
        [(0, 3, 9, 0, 2), (9, 10, 0, 9, 9), (8, 9, 5, 7, 8), (10, 11, 4, 10, 11), nothing, nothing],
    ]
    capture, inputs = CPU.new_step_capture(), torch.randn(6, kind.width).to(dtype)
    plan, replay, result, ones = None, None, None, torch.ones(kind.num_values, dtype=dtype)
    for chunks in steps:
        batch = batch_of(chunks)
        inputs.copy_(torch.randn(6, kind.width))
        if plan is None:
            plan = capture.plan_states(batch, captured)

            def compute(plan=plan):
                first = CPU.activate(CPU.recur(captured, 0, inputs, weights, plan), "tanh")
                return CPU.add_rms_norm(CPU.recur(captured, 1, inputs, weights, plan), first, ones, 1e-6)[0]

            result, replay = capture.capture(compute)
        else:
            capture.refill_states(plan, batch)
            replay()
        first = CPU.activate(recur(CPU, plain, batch, inputs, weights, 0), "tanh")
        second = recur(CPU, plain, batch, inputs, weights, 1)
        assert torch.equal(result, CPU.add_rms_norm(second, first, ones, 1e-6)[0])
        assert torch.equal(captured.data, plain.data)


def test_a_plan_takes_only_steps_of_its_size():
    storage = CPU.allocate_states(group_of(KINDS["delta"]), DEVICE)
    capture = CPU.new_step_capture()
    plan = capture.plan_states(batch_of([(3, 5, 1, 2, 5)]), storage)
    for chunks, snapshots in (
        ([(3, 4, 1, 2, 4), (3, 4, 2, 2, 4)], []),
        ([(3, 6, 1, 2, 6)], []),
        ([(3, 5, 1, 2, 5)], [(0, 4, 2)]),
    ):
        with pytest.raises(ValueError, match="1 chunks of 2 tokens with 0 snapshots cannot hold"):
            capture.refill_states(plan, batch_of(chunks, snapshots))


# ---- blocks ----


@pytest.mark.parametrize("pairs", [[[1, 2], [2, 3], [3, 1], [5, 9]], [[1, 2], [1, 3], [5, 9]]])
def test_copies_are_those_of_the_reference(pairs):
    group = group_of(KINDS["mamba2"], "bfloat16")
    found, expected = CPU.allocate_states(group, DEVICE), REFERENCE.allocate_states(group, DEVICE)
    expected.data.normal_()
    found.data.copy_(expected.data)
    for kernels, storage in ((CPU, found), (REFERENCE, expected)):
        kernels.copy_states(storage, torch.tensor(pairs))
    assert torch.equal(found.data, expected.data)


def test_only_large_blocks_are_in_huge_pages(monkeypatch):
    asked, pages = [], states.pages
    monkeypatch.setattr(states, "pages", lambda size, *, huge: (asked.append(huge), pages(size, huge=huge))[1])
    kind = StateKind("delta", 4, 128, 4, num_key_heads=4, key_dim=128)
    for group in (
        group_of(kind, num_blocks=2),
        group_of(kind, "bfloat16", num_blocks=2),
        group_of(KINDS["convolution"]),
    ):
        storage = CPU.allocate_states(group, DEVICE)
        assert storage.data.shape == (group.num_blocks, 2, group.kind.numbers(3))
        assert not storage.data.any()
    assert asked == [True, False, False]


def test_what_does_not_fit_is_refused():
    kind = KINDS["delta"]
    storage, weights = CPU.allocate_states(group_of(kind), DEVICE), weights_of(kind)
    batch = batch_of([(0, 2, 1, 0, 2)])
    for inputs, layer, error in (
        (torch.zeros(3, kind.width), 0, ValueError),
        (torch.zeros(2, kind.width + 1), 0, ValueError),
        (torch.zeros(2, kind.width), 2, IndexError),
        (torch.zeros(2, kind.width, dtype=torch.float16), 0, TypeError),
    ):
        with pytest.raises(error):
            recur(CPU, storage, batch, inputs, weights, layer)
    transposed = replace(weights, conv_weight=weights.conv_weight.t().contiguous().t())
    with pytest.raises(ValueError, match="contiguous convolution"):
        recur(CPU, storage, batch, torch.zeros(2, kind.width), transposed)
    with pytest.raises(ValueError, match="meta"):
        CPU.allocate_states(group_of(kind), torch.device("meta"))
    assert not storage.data.any()

"""Recurrent states of prompts by the Triton kernels, in pieces with matrix products, against the reference."""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from triton_random_tensors import normal, poisoned_empty
from triton_state_blocks import CONVOLUTION, DELTA, KDA, KINDS, MAMBA2, MAX_PENDING, NUM_BLOCKS, WIDE, States, batch_of

from quire.core.states import StateKind

pytest.importorskip("triton")
from quire.kernels.triton.deterministic import TRITON_DETERMINISTIC
from quire.kernels.triton.kernels import TRITON
from quire.kernels.triton.state_plan import LEAST_SETTLED, plan_states
from quire.kernels.triton.step_capture import CudaGraphCapture

ONE_HEAD = StateKind("delta", num_value_heads=1, value_dim=6, conv_width=4, num_key_heads=1, key_dim=16)
RULES = {name: kind for name, kind in KINDS.items() if kind not in (CONVOLUTION, KDA)}
DECODE, PROMPT, REST = (40, 41, 39, 40), (0, 70, 0, 68), (7, 30, 4, 30)


@pytest.fixture(scope="module", autouse=True)
def poison():
    """torch.empty gives NaN, so that values which a kernel does not write are found."""
    with patch.object(torch, "empty", poisoned_empty):
        yield


@pytest.mark.parametrize("kind", RULES.values(), ids=RULES)
def test_prompts_beside_decoding_sequences_are_those_of_the_reference(kind):
    batch = batch_of([DECODE, PROMPT, (3, 6, 2, 4), REST], snapshots=[(1, 20, 6), (1, 65, 7), (3, 30, 8)])
    states = States(kind)
    assert plan_states(batch, states.storage).num_long == 2
    states.check(batch)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_states_of_prompts_are_rounded_once(stored):
    states = States(DELTA, stored, torch.bfloat16)
    states.check(batch_of([PROMPT, REST], snapshots=[(0, 66, 4), (0, 67, 5)]))


def test_mamba2_skips_and_limits_time_steps():
    States(MAMBA2, skip=normal(9, 4), time_limits=(0.3, 0.9)).check(batch_of([PROMPT, REST]))


@pytest.mark.parametrize("lengths", [range(1, 9), range(9, 33), range(33, 49), range(49, 65)], ids=str)
def test_pieces_of_all_lengths_are_those_of_the_reference(lengths):
    """Snapshots cut the pieces."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    assert len(ends) + 1 <= 3 * NUM_BLOCKS
    with patch("triton_state_blocks.NUM_BLOCKS", 3 * NUM_BLOCKS):
        states = States(ONE_HEAD)
    snapshots = [(0, 3 + end, 1 + i) for i, end in enumerate(ends)]
    states.check(batch_of([(3, 3 + ends[-1], 3, 3 + ends[-1])], snapshots=snapshots))


def test_keys_that_are_all_equal_do_not_lose_digits():
    """Then the triangular matrix of a piece is as far from the identity as it can be."""
    states = States(ONE_HEAD)
    same = states.inputs(1)
    same[:, ONE_HEAD.num_channels] = 4  # b: beta is nearly 1
    same[:, ONE_HEAD.num_channels + 1] = -9  # a: hardly any decay
    with patch.object(states, "inputs", lambda number: same.repeat(number, 1)):
        states.check(batch_of([(0, 64, 0, 64)]))


def test_the_number_of_settled_tokens_decides_whether_a_chunk_is_cut_into_pieces():
    storage = States(WIDE).storage
    least = LEAST_SETTLED
    chunks = [(2, 2 + least, 1, least), (2, 2 + least, 1, least + 1), (0, least, 0, least), (0, 200, 0, 200)]
    plan = plan_states(batch_of(chunks, [0, 1, 2, -1]), storage)
    assert (plan.num_long, plan.order.tolist()) == (2, [0, 3, 1, 2])
    refilled = CudaGraphCapture().plan_states(batch_of(chunks), storage)
    assert (refilled.num_long, refilled.order.tolist()) == (0, [0, 1, 2, 3])


def test_deterministic_kernels_compute_prompts_token_by_token():
    """Then the bits of a prompt are those of its tokens one after the other."""
    states, out = States(ONE_HEAD), []
    x = states.inputs(20)
    for kernels, cuts in ((TRITON_DETERMINISTIC, [0, 20]), (TRITON_DETERMINISTIC, [0, 3, 20]), (TRITON, [0, 20])):
        states.storage.data.zero_()
        steps = [(start, stop, start, stop) for start, stop in pairwise(cuts)]
        rows = [
            kernels.recur(
                states.storage, 0, x[step[0] : step[1]], states.weights, plan_states(batch_of([step]), states.storage)
            )
            for step in steps
        ]
        out.append(torch.cat(rows))
    assert torch.equal(out[0], out[1])
    assert not torch.equal(out[0], out[2])
    assert len(out[0]) > LEAST_SETTLED > MAX_PENDING

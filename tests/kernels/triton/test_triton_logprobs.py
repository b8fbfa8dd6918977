"""Log probabilities in Triton against float64 and the reference, compiled on a GPU or interpreted on a CPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import DEVICE

from quire.kernels import reference

pytest.importorskip("triton")
likelihood = pytest.importorskip("quire.kernels.triton.likelihood")

# The interpreter computes with numpy, which warns of inf - inf and the like. Rows with such logits are intended.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def poison():
    """torch.empty gives NaN and large integers."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def normal(num_rows, vocab_size, seed=0, deviation=3.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * deviation


def logprobs(logits, tokens, k):
    return tuple(x.cpu() for x in likelihood.logprobs(logits.to(DEVICE), tokens, k))


def check(logits, tokens, k):
    """Compare with float64, and check that ranks and order follow from the values."""
    values, ranks, top_ids, top_values = logprobs(logits, tokens, k)
    assert (values.dtype, ranks.dtype, top_ids.dtype) == (torch.float32, torch.int32, torch.int32)
    assert top_values.shape == top_ids.shape == (len(logits), k)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(values.double(), exact.gather(1, tokens), atol=4e-6, rtol=1e-6)
    every = torch.arange(logits.shape[1]).repeat(len(logits), 1)
    ours = logprobs(logits, every, 0)[0]  # all values, sorted by torch
    assert torch.equal(ours.gather(1, tokens), values)
    assert ranks.tolist() == ((ours > values[:, :1]).sum(-1) + 1).tolist()
    order = np.argsort(-ours.numpy(), axis=-1, kind="stable")[:, :k]
    assert top_ids.tolist() == order.tolist()
    assert torch.equal(top_values, ours.gather(1, top_ids.long()))


@settings(max_examples=20, deadline=None)
@given(
    num_rows=st.integers(1, 4),
    vocab_size=st.sampled_from([1, 2, 15, 64, 1000, 2047, 2048, 2049, 5000]),
    num_tokens=st.integers(1, 4),
    coarse=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def test_rows_equal_a_slow_softmax(num_rows, vocab_size, num_tokens, coarse, dtype, data, seed):
    logits = normal(num_rows, vocab_size, seed)
    if coarse:
        logits = logits.round()  # many ties, and -0.0
    generator = torch.Generator().manual_seed(seed)
    logits[:, 1:][torch.rand(num_rows, vocab_size - 1, generator=generator) < 0.2] = -torch.inf
    tokens = torch.randint(vocab_size, (num_rows, num_tokens), generator=generator)
    check(logits.to(dtype), tokens, data.draw(st.integers(0, vocab_size)))


@pytest.mark.parametrize(("k", "deviation"), [(0, 0.0), (1, 1e-7), (500, 5.0)])
def test_a_large_vocabulary(k, deviation):
    check(normal(1, 152064, 1, deviation), torch.tensor([[3, 152063]]), k)


def test_logprobs_equal_the_reference():
    logits, tokens = normal(20, 3000, 3), torch.arange(60).reshape(20, 3) * 7
    ours, theirs = logprobs(logits, tokens, 40), reference.logprobs(logits, tokens, 40)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, atol=3e-6, rtol=0)


def test_equals_are_equal_and_in_the_order_of_ids():
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 1.0, 0.0]])
    values, ranks, ids, _ = logprobs(logits, torch.tensor([[2, 0, 5]]), 6)
    assert ids.tolist() == [[1, 3, 4, 0, 2, 5]]
    assert values[0, 0] == values[0, 1] == values[0, 2]
    assert ranks.tolist() == [4]


def test_zeros_of_either_sign_are_the_same_value():
    """In a row whose most likely token has all of the probability, 0 - log(1) is a zero."""
    logits = torch.full((1, 50), -1000.0)
    logits[0, [7, 30]] = torch.tensor([5.0, 5.0])
    logits[0, 30] = -torch.inf
    values, ranks, ids, _ = logprobs(logits, torch.tensor([[7]]), 2)
    assert (values.tolist(), ranks.tolist(), ids.tolist()) == ([[0.0]], [1], [[7, 0]])


def test_logits_far_apart_are_reported_exactly():
    logits = torch.full((1, 300), -3e38)
    logits[0, 100], logits[0, 200] = 3e38, -torch.inf
    values, ranks, top_ids, _ = logprobs(logits, torch.tensor([[100, 200, 5]]), 2)
    assert values.tolist() == [[0, -torch.inf, -torch.inf]]
    assert ranks.tolist() == [1]
    assert top_ids.tolist() == [[100, 0]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, None])
@pytest.mark.parametrize("vocab_size", [100, 2500])
def test_unusable_rows_are_nan_and_change_no_other_row(bad, vocab_size):
    logits = normal(3, vocab_size, 4)
    if bad is None:
        logits[1] = -torch.inf
    else:
        logits[1, vocab_size - 1] = bad
    tokens = torch.tensor([[1, 2], [3, 4], [5, 6]])
    values, ranks, top_ids, top_values = logprobs(logits, tokens, 3)
    assert values[1].isnan().all()
    assert top_values[1].isnan().all()
    assert ranks[1] == 1
    assert len(set(top_ids[1].tolist()) & set(range(vocab_size))) == 3
    assert values[::2].isfinite().all()


def test_rows_do_not_depend_on_company():
    logits, tokens = normal(6, 2100, 5), torch.arange(6).unsqueeze(1)
    together = logprobs(logits, tokens, 10)
    for i in range(6):
        alone = logprobs(logits[i : i + 1], tokens[i : i + 1], 10)
        assert all(torch.equal(one[0], all_[i]) for one, all_ in zip(alone, together, strict=True))


def test_rows_may_lie_apart_and_columns_too():
    wide = normal(4, 700, 10).to(DEVICE)
    tokens = torch.tensor([[3], [5], [7], [9]])
    for logits in (wide[:, 100:400], wide.T.contiguous().T):
        ours = logprobs(logits, tokens, 5)
        theirs = logprobs(logits.contiguous(), tokens, 5)
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_no_rows_have_no_values():
    found = logprobs(torch.empty(0, 10), torch.empty(0, 2, dtype=torch.int64), 3)
    assert [x.shape for x in found] == [(0, 2), (0,), (0, 3), (0, 3)]


def test_shapes_and_token_ids_that_do_not_fit_the_logits_are_refused():
    logits = normal(2, 10)
    for tokens, k in (([[1]], 2), ([[], []], 2), ([[1], [2]], 11), ([[1], [2]], -1)):
        with pytest.raises(ValueError, match="do not fit"):
            logprobs(logits, torch.tensor(tokens, dtype=torch.int64), k)
    for token in (-1, 10):
        with pytest.raises(IndexError, match=r"tokens must be in \[0, 10\)"):
            logprobs(logits, torch.tensor([[1], [token]]), 2)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU is always in step with itself")
def test_logprobs_do_not_synchronize_with_the_device():
    logits, tokens = normal(2, 3000).to(DEVICE), torch.tensor([[3], [5]])
    likelihood.logprobs(logits, tokens, 5)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        likelihood.logprobs(logits, tokens, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")

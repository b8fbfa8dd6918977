"""Log probabilities on CPUs against float64 and against plain torch, for every build that runs here."""

import numpy as np
import pytest
import torch
from cpu_kernel_builds import each_with, in_use
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import reference

_C = pytest.importorskip("quire.kernels.cpu._C")
likelihood = pytest.importorskip("quire.kernels.cpu.likelihood")


@pytest.fixture(params=each_with(1, 2))
def machine(request):
    with in_use(request.param) as threads:
        yield threads


def normal(num_rows, vocab_size, seed=0, deviation=3.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * deviation


def check(logits, tokens, k):
    """Compare with float64, and check that ranks and order follow from the values."""
    values, ranks, top_ids, top_values = likelihood.logprobs(logits, tokens, k)
    assert (values.dtype, ranks.dtype, top_ids.dtype) == (torch.float32, torch.int32, torch.int32)
    assert top_values.shape == top_ids.shape == (len(logits), k)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(values.double(), exact.gather(1, tokens), atol=4e-6, rtol=1e-6)
    every = torch.arange(logits.shape[1]).expand(len(logits), -1)
    ours = likelihood.logprobs(logits, every, 0)[0]  # all values, sorted by torch
    assert torch.equal(ours.gather(1, tokens), values)
    assert ranks.tolist() == ((ours > values[:, :1]).sum(-1) + 1).tolist()
    order = np.argsort(-ours.numpy(), axis=-1, kind="stable")[:, :k]
    assert top_ids.tolist() == order.tolist()
    assert torch.equal(top_values, ours.gather(1, top_ids.long()))


@settings(max_examples=60)
@given(
    num_rows=st.integers(1, 5),
    vocab_size=st.sampled_from([1, 2, 15, 16, 17, 64, 65, 1000, 5000]),
    num_tokens=st.integers(1, 4),
    coarse=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def check_rows(num_rows, vocab_size, num_tokens, coarse, dtype, data, seed):
    logits = normal(num_rows, vocab_size, seed)
    if coarse:
        logits = logits.round()
    generator = torch.Generator().manual_seed(seed)
    logits[:, 1:][torch.rand(num_rows, vocab_size - 1, generator=generator) < 0.2] = -torch.inf
    tokens = torch.randint(vocab_size, (num_rows, num_tokens), generator=generator)
    check(logits.to(dtype), tokens, data.draw(st.integers(0, vocab_size)))


def test_rows_equal_a_slow_softmax(machine):
    check_rows()


@pytest.mark.parametrize("k", [0, 1, 20, 500, 5000])
@pytest.mark.parametrize("deviation", [0.0, 1e-7, 0.5, 5.0])
def test_a_large_vocabulary(machine, k, deviation):
    check(normal(2, 152064, 1, deviation), torch.tensor([[3, 152063], [70000, 0]]), k)


def test_top_logprobs_may_be_as_many_as_a_large_vocabulary(machine):
    check(normal(1, 152064, 2).bfloat16(), torch.tensor([[3]]), 152064)


def test_logprobs_equal_the_reference(machine):
    logits, tokens = normal(20, 3000, 3), torch.arange(60).reshape(20, 3) * 7
    ours, theirs = (module.logprobs(logits, tokens, 40) for module in (likelihood, reference))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, atol=3e-6, rtol=0)


def test_logits_far_apart_are_reported_exactly(machine):
    logits = torch.full((1, 300), -3e38)
    logits[0, 100], logits[0, 200] = 3e38, -torch.inf
    values, ranks, top_ids, _ = likelihood.logprobs(logits, torch.tensor([[100, 200, 5]]), 2)
    assert values.tolist() == [[0, -torch.inf, -torch.inf]]
    assert ranks.tolist() == [1]
    assert top_ids.tolist() == [[100, 0]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, None])
def test_unusable_rows_are_nan_and_change_no_other_row(machine, bad):
    logits = normal(3, 100, 4)
    if bad is None:
        logits[1] = -torch.inf
    else:
        logits[1, 99] = bad
    tokens = torch.tensor([[1, 2], [3, 4], [5, 6]])
    for module in (likelihood, reference):
        values, ranks, top_ids, top_values = module.logprobs(logits, tokens, 3)
        assert values[1].isnan().all()
        assert top_values[1].isnan().all()
        assert ranks[1] == 1
        assert len(set(top_ids[1].tolist()) & set(range(100))) == 3
        assert values[::2].isfinite().all()


def test_rows_do_not_depend_on_company(machine):
    logits, tokens = normal(9, 2001, 5), torch.arange(9).unsqueeze(1)
    together = likelihood.logprobs(logits, tokens, 10)
    for i in range(9):
        alone = likelihood.logprobs(logits[i : i + 1], tokens[i : i + 1], 10)
        assert all(torch.equal(one[0], all_[i]) for one, all_ in zip(alone, together, strict=True))


def test_shapes_and_token_ids_that_do_not_fit_the_logits_are_refused():
    logits = normal(2, 10)
    for tokens, k in (([[1]], 2), ([[], []], 2), ([[1], [2]], 11), ([[1], [2]], -1)):
        with pytest.raises(ValueError, match="do not fit"):
            likelihood.logprobs(logits, torch.tensor(tokens, dtype=torch.int64), k)
    for token in (-1, 10):
        with pytest.raises(IndexError, match=r"tokens must be in \[0, 10\)"):
            likelihood.logprobs(logits, torch.tensor([[1], [token]]), 2)

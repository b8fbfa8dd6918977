"""Philox against its authors' test vectors and against an implementation in Python integers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracles import in_python

from quire.kernels.reference.philox import exponential, philox

# Known answers of philox4x32-10, from the kat_vectors file of Random123 (Salmon et al.).
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def on_tensors(counter, key):
    out = philox(tuple(torch.tensor(x) for x in counter), tuple(torch.tensor(x) for x in key))
    return [int(word) for word in out]


@pytest.mark.parametrize(("counter", "key", "answer"), VECTORS)
def test_known_answers(counter, key, answer):
    assert in_python(words(counter), words(key)) == words(answer)
    assert on_tensors(words(counter), words(key)) == words(answer)


word = st.integers(0, 2**32 - 1)


@settings(max_examples=50, deadline=None)
@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_tensors_equal_python(counter, key):
    assert on_tensors(counter, key) == in_python(counter, key)


def test_counters_and_keys_broadcast():
    rows, columns = torch.tensor([[3], [2**32 - 1]]), torch.arange(5).unsqueeze(0)
    out = philox((rows, rows * 0, rows * 0 + 2, columns), (rows, rows * 0 + 7))
    for i, row in enumerate(rows.flatten().tolist()):
        for j in range(5):
            assert [int(word[i, j]) for word in out] == in_python((row, 0, 2, j), (row, 7))


@pytest.mark.parametrize(
    "word", [0, 1, 2, 1000, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2**20, 2**32 - 1000, 2**32 - 2, 2**32 - 1]
)
def test_exponentials_keep_their_digits_at_both_ends(word):
    exact = -math.log1p(-(2**32 - 1 - word + 0.5) / 2**32) if word > 2**30 else -math.log((word + 0.5) / 2**32)
    found = exponential(torch.tensor([word]))
    assert found.dtype == torch.float32
    assert math.isclose(found.item(), exact, rel_tol=3e-7)


def test_exponentials_fall_as_words_grow():
    values = exponential(torch.linspace(0, 2**32 - 1, 10001, dtype=torch.float64).long())
    assert (values.diff() < 0).all()
    assert values.min() > 0
    assert abs(values.mean() - 1) < 0.01

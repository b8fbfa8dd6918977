"""The rows of pairwise tables (tests/rigs/pairwise.py)."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairwise


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_rows_have_each_pair_of_values_of_two_factors(sizes):
    factors = {f"factor {i}": [f"{i}.{value}" for value in range(size)] for i, size in enumerate(sizes)}
    rows = pairwise(**factors)
    for one, other in combinations(factors, 2):
        assert len({(row[one], row[other]) for row in rows}) == len(factors[one]) * len(factors[other])
    assert all(list(row) == list(factors) for row in rows)
    assert rows == pairwise(**factors)


def test_rows_are_far_fewer_than_all_combinations():
    rows = pairwise(build=range(4), threads=range(3), scheme=range(30), rows=range(13), columns=range(15))
    assert 30 * 15 <= len(rows) < 1.3 * 30 * 15, "all combinations are 70,200"


def test_values_may_be_equal_and_need_no_hash():
    assert len(pairwise(one=[{}, {}], other=[[], [], []])) == 6


def test_one_factor_has_no_pairs():
    with pytest.raises(ValueError, match="two factors"):
        pairwise(one=[1, 2])

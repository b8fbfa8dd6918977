"""Rows of a test table in which each two values of different factors meet at least once.

Faults of kernels need one value or two (a scheme and a size, a build and a number of rows), rarely three. All
combinations of four builds, 30 schemes and 15 sizes are 1,800 rows. Some 450 of them have all pairs.
"""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(**factors: Iterable[Any]) -> list[dict[str, Any]]:
    """Rows name -> value. Each pair of values of two factors is in a row. The same factors give the same rows.

    A row starts with the first pair that no row has yet. Each other factor adds the value that completes the most new
    pairs, and of equals the one that was used least.
    """
    values = {name: list(some) for name, some in factors.items()}
    if len(values) < 2:
        raise ValueError("pairs need two factors or more")
    missing = {
        pair: None
        for one, other in combinations(values, 2)
        for pair in product(_places(one, values), _places(other, values))
    }
    uses = {place: 0 for name in values for place in _places(name, values)}
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in values:
            if name not in row:
                row[name] = max(
                    range(len(values[name])),
                    key=lambda i, name=name: (
                        sum(pair in missing for pair in _pairs({**row, name: i}, values, name)),
                        -uses[name, i],
                    ),
                )
        for pair in _pairs(row, values):
            missing.pop(pair, None)
        for place in row.items():
            uses[place] += 1
        rows.append({name: values[name][row[name]] for name in values})
    return rows


def _places(name, values):
    return [(name, i) for i in range(len(values[name]))]


def _pairs(row, values, of=None):
    """Pairs of a row in the order of factors; all, or those of one factor."""
    known = [(name, row[name]) for name in values if name in row]
    return [pair for pair in combinations(known, 2) if of is None or of in (pair[0][0], pair[1][0])]

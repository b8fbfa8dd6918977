"""Children of a radix node, against a sorted dictionary."""

import random

import pytest

from quire.cache.prefix import radix_node
from quire.cache.prefix.radix_node import SortedChildren


@pytest.mark.parametrize("most", [1, 2, 7, 512])
def test_children_are_a_sorted_map(monkeypatch, most):
    monkeypatch.setattr(radix_node, "MOST_IN_A_RUN", most)
    rng = random.Random(most)
    ours: SortedChildren[int] = SortedChildren()
    model: dict[bytes, int] = {}
    for number in range(2500):
        key = rng.randbytes(rng.choice([1, 1, 2]))
        if key in model and rng.random() < 0.6:
            ours.remove(key)
            del model[key]
        elif key in model:
            ours.replace(key, number)
            model[key] = number
        else:
            ours.add(key, number)
            model[key] = number
        order = sorted(model)
        assert ours.keys == order and len(ours) == len(model) and bool(ours) == bool(model)
        assert list(ours) == [model[k] for k in order] == list(reversed(list(reversed(ours))))
        assert ours.only == (model[order[0]] if len(order) == 1 else None)
        wanted = rng.randbytes(2)
        assert ours.get(wanted) == model.get(wanted)
        assert list(ours.before(wanted)) == [model[k] for k in reversed(order) if k < wanted]
        assert list(ours.from_key(wanted)) == [model[k] for k in order if k >= wanted]
    for key in sorted(model):
        ours.remove(key)
    assert not ours and ours.only is None and ours.keys == []

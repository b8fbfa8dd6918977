"""Budget of examples: the profile `thorough` runs a test in full, the others with a part of its examples.

Of recorded examples they take another part for each seed, so that all are run in turn.
"""

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import settings

Example = TypeVar("Example")
_THOROUGH = 100  # max_examples of the profile `thorough`


def examples(most: int) -> int:
    """The number of examples in this profile of a test that has `most` in the profile `thorough`."""
    return max(1, most * settings.default.max_examples // _THOROUGH)


def is_thorough() -> bool:
    """Whether each test runs in full."""
    return settings.default.max_examples >= _THOROUGH


def seed_of(config: pytest.Config) -> int:
    """The seed on the command line, or 0."""
    return int(config.getoption("--hypothesis-seed") or 0)


def part_of(recorded: Sequence[Example], config: pytest.Config) -> Sequence[Example]:
    """The examples of this profile and of the seed on the command line."""
    step = max(1, _THOROUGH // settings.default.max_examples)
    return recorded[seed_of(config) % step :: step]

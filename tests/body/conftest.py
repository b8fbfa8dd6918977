"""Checkpoints that several files of these tests read and none may change."""

import checkpoints
import pytest
from hypothesis import settings

settings.register_profile("native", deadline=None, derandomize=True, max_examples=3)  # under sanitizers, see Makefile


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """kind -> (folder, the transformers model), made once."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = (folder, checkpoints.save(folder, kind))
        return made[kind]

    return get

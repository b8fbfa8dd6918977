"""Checkpoints shared by several test files, which may not change them."""

import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A function from a kind to (folder, transformers model), each created once."""
    import random_checkpoints as checkpoints  # noqa: PLC0415  (it imports transformers)

    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = (folder, checkpoints.save(folder, kind))
        return made[kind]

    return get

"""Checkpoints that several files of these tests read and none may change."""

import checkpoints
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors here are tiny: waiting for a second thread takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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

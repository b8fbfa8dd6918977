"""For all tests: one thread. Tensors are tiny here, and waiting for a second thread takes longer than the work."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)

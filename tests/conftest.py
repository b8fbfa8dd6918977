"""For all tests: one thread, and hypothesis without a clock or dice, so that a red run can be repeated."""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # Triton's kernels are interpreted, which it decides when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["checkpoint_fixtures", "embedded_model_fixtures"]

settings.register_profile("quire", deadline=None, derandomize=True)
settings.register_profile("native", deadline=None, derandomize=True, max_examples=3)  # under sanitizers, see Makefile
settings.load_profile("quire")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors are tiny here, and waiting for a second thread takes longer than the work."""
    torch.set_num_threads(1)

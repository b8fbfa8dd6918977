"""The published model as it is served, and with expanded weights. It is large enough for two threads."""

import pytest
import torch
from real_model import model_file, transformers_model


@pytest.fixture(scope="module", autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def file():
    return model_file()


@pytest.fixture(scope="module")
def reference(file):
    return transformers_model(file)


@pytest.fixture(scope="module")
def served_llm(file):
    """The weights as the file stores them."""
    from quire import LLM  # noqa: PLC0415  (only if there is a file)

    made = LLM(str(file), memory="3GiB", max_num_seqs=64)
    yield made
    made.close()


@pytest.fixture(scope="module")
def exact_llm(file):
    """Expanded weights, float32."""
    from quire import LLM  # noqa: PLC0415

    made = LLM(str(file), dtype="float32", quantization="none", memory="2GiB", max_model_len=2048)
    yield made
    made.close()

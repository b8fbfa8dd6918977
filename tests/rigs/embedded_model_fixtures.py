"""The embedded model and its tokenizer, each loaded once because loading is slow."""

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    from quire.hub import embedded  # noqa: PLC0415  (most tests need neither)
    from quire.tokenizer.tokenizer import Tokenizer  # noqa: PLC0415

    return Tokenizer.from_folder(embedded.folder())


@pytest.fixture(scope="session")
def llm():
    from quire import LLM  # noqa: PLC0415

    return LLM(max_num_seqs=16, memory="256MiB", dtype="float32")

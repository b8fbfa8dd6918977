"""A loaded model and a served one, each made once: loading is what takes time here."""

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from front_rig import run_app, small_engine

from quire import LLM
from quire.engine import embedded
from quire.engine.build import Built
from quire.engine.tokenizer import Tokenizer
from quire.server.app import make_app
from quire.server.service import Service


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(embedded.folder())


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(max_num_seqs=16, memory="256MiB")


@dataclass
class Served:
    url: str
    built: Built

    def health(self) -> dict:
        return httpx.get(f"{self.url}/health").json()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    built = small_engine()
    with run_app(make_app(Service(built))) as url:
        yield Served(url, built)

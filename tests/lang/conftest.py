"""An engine, a server with another engine, each created once; fake backends, closed at the end of their test."""

import pytest
from embedded_model_server import run_app, service_of, small_engine
from fake_lang_backend import Pretend

import quire.lang as sgl
from quire.lang.backends.engine import EngineBackend
from quire.server.app import make_app


@pytest.fixture(scope="session")
def engine():
    with EngineBackend(small_engine()) as backend:
        yield backend


@pytest.fixture(scope="session")
def url():
    with run_app(make_app(service_of(small_engine()))) as url:
        yield url


@pytest.fixture(scope="session")
def endpoint(url):
    with sgl.RuntimeEndpoint(url) as backend:
        yield backend


@pytest.fixture
def pretend():
    made = []

    def make(*arguments, **options):
        made.append(Pretend(*arguments, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()

"""Servers with a model, with and without keys, each created once."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import openai
import pytest
from embedded_model_server import STORY, run_app, service_of, small_engine
from multi_tenant_server import Site, run_site

from quire.server.app import make_app
from quire.server.middleware.quota import Quota
from quire.startup.build import Built


@dataclass
class Served:
    url: str
    built: Built

    def health(self) -> dict:
        return httpx.get(f"{self.url}/health").json()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    built = small_engine()
    with run_app(make_app(service_of(built))) as url:
        yield Served(url, built)


@pytest.fixture(scope="session")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http(served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def no_refills() -> Iterator[None]:
    """Keys that are read meanwhile: their rate limits see no time pass, however long a test takes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Quota.__init__, "__defaults__", (None, None, lambda: 10**12))
        yield


@pytest.fixture(scope="session")
def offline(llm):
    """Complete one prompt offline. Parameters default to the model's, as for requests."""

    def complete(prompt=STORY, **params):
        (result,) = llm.generate(prompt, replace(llm.get_default_sampling_params(), **params))
        return result

    return complete


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A server with keys of two tenants and of an admin."""
    with run_site("ann", "bob", "root") as site:
        yield site


@pytest.fixture(scope="module")
def keyless() -> Iterator[Site]:
    with run_site() as site:
        yield site


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A self-signed certificate of 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    about = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    subprocess.run([*new, "-keyout", key, "-out", cert, *about], check=True, capture_output=True)
    return str(cert), str(key)

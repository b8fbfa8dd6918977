"""Settings of all tests: one torch thread; hypothesis without deadlines, and with fixed seeds by default."""

import quire  # noqa: F401 (before torch: it bounds how long waiting threads spin, as they do in an engine)

# isort: split
import inspect
import os
from pathlib import Path

import certifi
import httpx
import pytest
import torch
from hypothesis import Phase, settings

if not torch.cuda.is_available():  # Triton decides on its interpreter when it is imported
    os.environ["TRITON_INTERPRET"] = "1"

os.environ.setdefault("PYTHONWARNINGS", "error")  # in the programs that tests start, as in the tests themselves

pytest_plugins = ["checkpoint_fixtures", "embedded_model_fixtures", "case_times"]

TESTS = Path(__file__).parent
APART = (TESTS / "benchmarks", TESTS / "real")  # run by `make test-benchmarks` and `make test-real`


def pytest_ignore_collect(collection_path, config):
    """Leave out the folders of APART unless an argument names a path in them."""
    if collection_path not in APART:
        return None
    named = [Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args]
    return None if any(path.resolve().is_relative_to(collection_path) for path in named) else True


# Phase.explain: on Python 3.13.0 its tracer stays after a failure, and all later tests take 20 times as long
IN_ALL = {"deadline": None, "phases": [phase for phase in Phase if phase is not Phase.explain]}
# see CONTRIBUTING.md; tests that set their own number of examples scale it with the profile (example_budget)
settings.register_profile("quire", **IN_ALL, derandomize=True, max_examples=25)
settings.register_profile("fresh", **IN_ALL, derandomize=False, print_blob=True, max_examples=25)
settings.register_profile("thorough", **IN_ALL, derandomize=False, print_blob=True, max_examples=100)
settings.register_profile("native", **IN_ALL, derandomize=True, max_examples=3)  # under sanitizers, see Makefile
settings.load_profile("quire")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors are tiny here: a second thread would cost more time than it saves."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def patient_clients():
    """HTTP clients of tests wait a minute by default, not five seconds: machines are busy at times."""
    default = inspect.signature(httpx.Client).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = 60.0


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory):
    """Each new HTTP client reads the certificates of all authorities in 35 ms. Servers of tests need none of them."""
    end = "-----END CERTIFICATE-----"
    first = Path(certifi.where()).read_text(encoding="utf-8").partition(end)[0] + end
    path = tmp_path_factory.mktemp("authority") / "one.pem"
    path.write_text(first, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", str(path))
        yield

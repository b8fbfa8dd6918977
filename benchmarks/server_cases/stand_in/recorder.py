"""Stands in for `tests/conftest.py` of vLLM: keeps the cases that reach a server, and records their results.

A line of JSON for each case goes to the file that the environment variable QUIRE_RESULTS names.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

_MOST = 400  # characters of a message


class LocalAssetServer:
    """vLLM's server of images, for annotations only."""


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    """No images are served: the cases that use them are not run."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that start no server: unit tests of vLLM's own code."""
    kept = [item for item in items if _reaches_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record the result of a case: of its call, or of a setup that did not succeed."""
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        message = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        record = {"case": item.nodeid, "outcome": report.outcome, "message": message[:_MOST]}
        with open(os.environ["QUIRE_RESULTS"], "a") as file:
            file.write(json.dumps(record) + "\n")
    return report


def _reaches_server(item: Any) -> bool:  # noqa: ANN401 (pytest's function items, untyped)
    """Whether a fixture of the case is a server or a client of one, or its own code starts a server."""
    return any("server" in name or "client" in name for name in item.fixturenames) or (
        "RemoteOpenAIServer" in item.function.__code__.co_names
    )

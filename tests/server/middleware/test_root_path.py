"""--root-path: requests with and without the path of a reverse proxy."""

import httpx
import pytest
from embedded_model_server import CHAT
from multi_tenant_server import run_site

from quire.errors import ConfigError
from quire.server.options import ServerOptions


@pytest.fixture(scope="module")
def site():
    with run_site("ann", options=ServerOptions(root_path="/some/llm")) as site:
        yield site


@pytest.mark.parametrize("prefix", ["", "/some/llm"])
def test_routes_are_found_with_and_without_the_path(site, prefix):
    assert site.ask("ann", "GET", f"{prefix}/v1/models").json()["object"] == "list"
    answer = site.post("ann", f"{prefix}/v1/chat/completions", messages=CHAT, max_tokens=2)
    assert answer.json()["choices"]
    assert site.ask(None, "GET", f"{prefix}/live").status_code == 200, "a probe without a key"
    assert site.ask(None, "GET", f"{prefix}/v1/models").status_code == 401
    refused = site.post("ann", f"{prefix}/v1/messages", messages=[])
    assert refused.json()["type"] == "error", "in the shape of the route"


@pytest.mark.parametrize("path", ["/some/llmx/v1/models", "/some/v1/models", "/some/llm/some/llm/v1/models"])
def test_other_paths_are_not(site, path):
    assert site.ask("ann", "GET", path).status_code == 404


def test_the_description_names_the_path(site):
    described = site.ask("ann", "GET", "/some/llm/openapi.json").json()
    assert {"url": "/some/llm"} in described["servers"]
    assert "/v1/models" in described["paths"]


def test_metrics_have_the_routes_without_the_path():
    with run_site(options=ServerOptions(root_path="/llm")) as site:
        httpx.get(f"{site.url}/llm/v1/models")
        assert 'handler="/v1/models"' in httpx.get(f"{site.url}/metrics").text


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b", "//llm", "/llm\n", "/" + "a" * 256])
def test_an_invalid_root_path_is_a_config_error(path):
    with pytest.raises(ConfigError, match="root_path"):
        ServerOptions(root_path=path).check()

"""Schemathesis on the server's OpenAPI document: only documented answers to any request, and nothing is held.

A longer run is `make fuzz`.
"""

import pytest
from embedded_model_server import run_app
from example_budget import examples
from fastapi import FastAPI, HTTPException
from multi_tenant_server import run_site
from pydantic import BaseModel

from quire.params import SamplingParams
from quire.server.openapi import EXAMPLES
from tools.schema_fuzz import fuzz, left


@pytest.fixture(scope="module")
def site():
    with run_site("root") as site:
        yield site


@pytest.mark.cpu_seconds(50, reason="Schemathesis makes 12,000 bodies, from which its hooks choose")
def test_every_route_answers_as_its_document_says(site):
    key = site.keys["root"]
    run = fuzz(site.url, key, examples=examples(8), seed=None, hooks="tests.rigs.schemathesis_hooks")
    assert run.returncode == 0, run.stdout
    assert "No issues found" in run.stdout
    assert "71 selected / 72 total" in run.stdout
    assert len(site.engine.namespaces) > 100  # otherwise most requests were rejected, and the test shows little
    assert left(site.url, key) == {}
    assert site.engine._engine.scheduler.check() == []


class Number(BaseModel):
    number: int


def test_an_undocumented_status_is_found():
    app = FastAPI()

    @app.post("/x")
    def never(body: Number) -> int:
        raise HTTPException(500)

    with run_app(app) as url:
        run = fuzz(url, "any", examples=5, seed=None)
    assert run.returncode == 1
    assert "[500] Internal Server Error" in run.stdout, run.stdout


def schemas(site):
    return site.ask("root", "GET", "/openapi.json").json()["components"]["schemas"]


@pytest.mark.parametrize(
    "name", ["n", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "frequency_penalty"]
)
def test_documented_bounds_are_those_that_hold(site, name):
    branch = schemas(site)["CompletionBody"]["properties"][name]["anyOf"][0]
    low, high = branch.get("minimum", branch.get("exclusiveMinimum")), branch["maximum"]
    within = [high] if "exclusiveMinimum" in branch else [low, high]
    for value in within:
        SamplingParams(**{name: value})
    for value in (low - 1, high + 1, *([low] if "exclusiveMinimum" in branch else [])):
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_the_document_names_model_vocabulary_keys_and_neutral_values(site):
    parts = schemas(site)
    fields = parts["CompletionBody"]["properties"]
    assert "enum" not in fields["model"]["anyOf"][0], "patterns and :latest stand for the model, too"
    assert fields["mirostat"]["enum"] == [None, 0]
    assert fields["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 2047
    assert fields["suffix"]["enum"] == [None, ""]
    assert parts["RetentionBody"]["properties"]["priority"]["anyOf"][0]["maximum"] == 100
    assert "maximum" not in fields["priority"]["anyOf"][0]
    assert "HTTPValidationError" not in parts
    document = site.ask("root", "GET", "/openapi.json").json()
    open_paths = {
        path for path, methods in document["paths"].items() if not any("security" in m for m in methods.values())
    }
    assert open_paths == {"/live", "/ready"}


# test_adapter_routes.py has the others, which need adapters
@pytest.mark.parametrize("path", [path for path in EXAMPLES if "lora" not in path])
def test_examples_in_the_document_work(site, path):
    for example in EXAMPLES[path].values():
        assert site.post("root", path, **example["value"]).status_code == 200

"""A server with or without keys, whose engine records the requests that it receives."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
import msgspec
from embedded_model_server import CHAT, DEFAULTS, MODEL, run_app, service_of, small_engine

from quire.server.api_keys import Keys, new_key
from quire.server.app import make_app
from quire.server.options import ServerOptions

MANY = {"n": 1, "max_tokens": 1}
GENERATING = {
    "/v1/completions": {"prompt": "Hello", **MANY},
    "/v1/chat/completions": {"messages": CHAT, **MANY},
    "/v1/chat/completions/batch": {"messages": [CHAT], "max_tokens": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "Hello"},
    "/generate": {"text": "Hello", "sampling_params": {"max_new_tokens": 1}},
    "/v1/messages": {"model": MODEL, "messages": CHAT, "max_tokens": 1},
    "/api/chat": {"model": MODEL, "messages": CHAT, "options": {"num_predict": 1}, "stream": False},
    "/api/generate": {"model": MODEL, "prompt": "Hello", "options": {"num_predict": 1}, "stream": False},
    "/api/embed": {"model": MODEL, "input": "Hello"},
    "/api/embeddings": {"model": MODEL, "prompt": "Hello"},
    **{path: {"text_1": "Hello", "text_2": "a"} for path in ("/score", "/v1/score")},
    **{path: {"query": "Hello", "documents": ["a"]} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
}
# those of them whose answers are never streamed
WHOLE = {
    path for path in GENERATING if path.endswith(("score", "rerank", "embed", "embeddings", "/chat/completions/batch"))
}


class Noting:
    """An engine that records namespaces and scheduling parameters. Tests may set explanations and metrics."""

    def __init__(self, engine):
        self._engine = engine
        self.namespaces = {}
        self.scheduling_params = {}
        self.explanations = {}
        self.figures = {}
        self.freed = None  # None: the engine's own result
        self.asked = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def add(self, request):
        self.namespaces[request.id] = request.namespace
        self.scheduling_params[request.id] = request.scheduling_params
        self._engine.add(request)

    def explain(self, request_id):
        self.asked.append(request_id)
        return self.explanations.get(request_id) or self._engine.explain(request_id)

    def flush_cache(self):
        if isinstance(self.freed, Exception):
            raise self.freed
        return self._engine.flush_cache() if self.freed is None else self.freed

    def stats(self):
        return msgspec.structs.replace(self._engine.stats(), **self.figures)


@dataclass
class Site:
    """A running server with the keys of its tenants."""

    app: object
    url: str
    engine: Noting
    keys: dict[str, str]

    def ask(self, who, method, path, **more):
        headers = {} if who is None else {"authorization": f"Bearer {self.keys[who]}"}
        headers["content-type"] = "application/json"
        return httpx.request(method, self.url + path, headers=headers, timeout=60, **more)

    def post(self, who, path, **body):
        return self.ask(who, "POST", path, content=json.dumps(body))  # json.dumps can write an unpaired surrogate


@contextmanager
def run_site(*names: str, options: ServerOptions = DEFAULTS) -> Iterator[Site]:
    """Serve with a key for each of these tenants, of which "root" is an admin; without names, serve without keys."""
    built = small_engine()
    engine = Noting(built.engine)
    made = {name: new_key(name, "admin" if name == "root" else "user") for name in names}
    keys = Keys([entry for _, entry in made.values()]) if made else None
    app = make_app(service_of(replace(built, engine=engine)), keys, options)
    with run_app(app) as url:
        yield Site(app, url, engine, {name: key for name, (key, _) in made.items()})


def error_of(answer):
    """The error object of an answer in any dialect: message, param and code, and a type unless it is Ollama's."""
    body = answer.json()
    error = body["error"]
    return error if isinstance(error, dict) else {**body, "message": error, "type": None}


def refused(answer, status, code):
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (status, code)
    if answer.json().keys() == {"error"}:
        assert error["type"] == "invalid_request_error"
    return error

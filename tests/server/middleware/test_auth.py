"""Authentication: accepted keys, and the namespace of a request."""

import asyncio
import json

import httpx
import pytest
from embedded_model_server import run_app, service_of, small_engine
from multi_tenant_server import GENERATING, error_of, refused
from server_probes import routes
from starlette.requests import Request

from quire.core.request import Namespace
from quire.server.api_keys import Keys, new_key
from quire.server.app import make_app
from quire.server.errors import Unauthenticated
from quire.server.middleware.auth import OPEN_FOLDER, OPEN_PATHS, AuthMiddleware, admins_only, caller_of

OPERATORS = {"/metrics", "/flush_cache", "/get_server_info", "/server_info", "/load", "/v1/fleet"}
CHANGES = {"/flush_cache", "/v1/fleet/{replica}/drain", "/v1/fleet/{replica}/restart"}


def test_every_route_needs_a_key(site):
    found = routes(site.app)
    assert {path for _, path in found} >= {*GENERATING, *OPERATORS, *OPEN_PATHS, "/docs", "/openapi.json", "/v1/models"}
    assert len(found) > 15
    for method, path in [*found, ("GET", "/"), ("POST", "/no/such/route"), ("OPTIONS", "/generate")]:
        answer = site.ask(None, method, path)
        if method in ("GET", "HEAD") and (path in OPEN_PATHS or path == f"{OPEN_FOLDER}mode.json"):
            assert answer.status_code == 200
        elif method in ("GET", "HEAD") and path.startswith(OPEN_FOLDER):
            refused(answer, 404, "route_not_found")
        elif method == "HEAD":
            assert answer.status_code == 401
        else:
            message = refused(answer, 401, "invalid_api_key")["message"]
            assert "Bearer" in message
            assert "valid API key" in message
            assert answer.headers["www-authenticate"] == "Bearer"


def test_a_route_that_is_added_later_needs_a_key_too():
    app = make_app(service_of(small_engine()), Keys([new_key("ann", "user")[1]]))

    @app.get("/later")
    async def later():
        return "secret"

    with run_app(app) as url:
        refused(httpx.get(f"{url}/later"), 401, "invalid_api_key")


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer wrong", "Basic {key}", "{key}", "Bearer {key}x", "Bearer x{key}", "Bearer é"],
)
def test_wrong_keys(site, value):
    header = value.format(key=site.keys["ann"]).encode("latin-1")
    refused(httpx.get(f"{site.url}/v1/models", headers={b"authorization": header}), 401, "invalid_api_key")


def test_a_key_may_stand_in_x_api_key(site):
    """As Anthropic's client sends it. Beside an authorization it is not read."""
    mine, path = site.keys["ann"], f"{site.url}/v1/models"
    assert httpx.get(path, headers={"x-api-key": mine}).status_code == 200
    for headers in ({"x-api-key": "wrong"}, {"x-api-key": ""}, {"x-api-key": mine, "authorization": "Bearer wrong"}):
        refused(httpx.get(path, headers=headers), 401, "invalid_api_key")


def test_right_keys(site):
    for scheme in ("Bearer", "bearer", "BEARER "):
        headers = {"authorization": f"{scheme} {site.keys['ann']}"}
        assert httpx.get(f"{site.url}/v1/models", headers=headers).status_code == 200
    assert site.ask("ann", "GET", "/openapi.json").status_code == 200


@pytest.mark.parametrize(("kind", "sends"), [("http", "http.response.start"), ("websocket", "websocket.close")])
def test_an_unauthenticated_request_body_is_not_read_and_reaches_no_route(kind, sends):
    async def unreachable(*_call):
        raise AssertionError("beyond the gate")

    sent = []

    async def send(message):
        sent.append(message)

    gate = AuthMiddleware(unreachable, Keys([new_key("ann", "user")[1]]))
    asyncio.run(gate({"type": kind, "path": "/v1/models", "headers": []}, unreachable, send))
    assert sent[0]["type"] == sends
    assert sent[0].get("status", 401) == 401


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("", "localhost", "localhost:8000", "LOCALHOST", "a.localhost", "127.0.0.1:8000")),
        *((host, True) for host in ("[::1]", "[::1]:8000", "192.0.2.1")),
        *((host, False) for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "evillocalhost")),
        *((host, False) for host in ("127.0.0.1.evil.example", "[::1", "[x]", "x")),
    ],
)
def test_without_keys_no_name_leads_here_but_local_ones(keyless, site, host, local):
    answer = httpx.get(f"{keyless.url}/v1/models", headers={"host": host})
    if local:
        assert answer.status_code == 200
    else:
        assert "localhost" in refused(answer, 403, "host_not_allowed")["message"]
    assert httpx.get(f"{keyless.url}/live", headers={"host": host}).status_code == 200
    mine = {"host": host, "authorization": f"Bearer {site.keys['ann']}"}
    assert httpx.get(f"{site.url}/v1/models", headers=mine).status_code == 200  # a key suffices with any host


def test_a_route_on_an_open_path_has_no_caller(site):
    request = Request({"type": "http", "state": {"caller": None}})
    for ask in (caller_of, admins_only):
        with pytest.raises(Unauthenticated):
            ask(request)


@pytest.mark.parametrize("path", sorted(OPERATORS))
def test_figures_of_all_tenants_need_the_role_admin(site, path):
    refused(site.ask("ann", "GET", path), 403, "insufficient_permissions")
    assert site.ask("root", "GET", path).status_code == 200


@pytest.mark.parametrize("path", sorted(CHANGES))
def test_changes_of_the_engines_need_an_admin(site, path):
    refused(site.ask("ann", "POST", path.replace("{replica}", "0")), 403, "insufficient_permissions")


def test_other_routes_do_not_ask_for_a_role(site):
    mine = {path for _, path in routes(site.app)} - OPERATORS - CHANGES
    assert len(mine) > 12
    for method, path in routes(site.app):
        if path in mine and path != "/monitor":  # which never ends, see test_monitor
            assert site.ask("ann", method, path).status_code != 403


@pytest.mark.parametrize("path", ["/ready", "/health"])
def test_health_has_figures_of_all_tenants_for_an_admin_only(site, keyless, path):
    plain = {"status"}
    assert site.ask("ann", "GET", path).json() == {"status": "ok"}
    assert site.ask(None, "GET", "/ready").json() == {"status": "ok"}
    more = set(site.ask("root", "GET", path).json()) - plain
    assert ("heartbeat_age_seconds" in more) == ("requests_running" in more) == (path == "/health")
    assert set(keyless.ask(None, "GET", path).json()) - plain == more


def namespace_of(site, answer):
    assert answer.status_code == 200, answer.text
    return site.engine.namespaces[f"{answer.headers['x-request-id']}-0"]


@pytest.mark.parametrize("path", GENERATING)
def test_the_key_chooses_the_tenant(site, keyless, path):
    for who in ("ann", "bob", "root"):
        assert namespace_of(site, site.post(who, path, **GENERATING[path])) == Namespace(tenant=who)
        salted = site.post(who, path, **GENERATING[path], cache_salt="bob")
        assert namespace_of(site, salted) == Namespace(tenant=who, salt="bob")
    assert namespace_of(keyless, keyless.post(None, path, **GENERATING[path])) == Namespace()
    salted = keyless.post(None, path, **GENERATING[path], cache_salt="a")
    assert namespace_of(keyless, salted) == Namespace(salt="a")


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("field", ["tenant", "namespace", "api_key", "role"])
def test_the_body_cannot_choose_the_tenant(site, path, field):
    answer = site.post("ann", path, **GENERATING[path], **{field: "bob"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "unknown_parameter")


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("user", [{"user": "bob"}, {"prompt_cache_key": "bob"}, {"model": "bob"}])
def test_other_names_in_the_body_change_nothing(site, path, user):
    answer = site.post("ann", path, **{**GENERATING[path], **user})
    if answer.status_code == 200:
        assert namespace_of(site, answer) == Namespace(tenant="ann")


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("salt", ["", "a" * 257, 3, True, ["a"], {"a": 1}, "\ud800"])
def test_salts_are_bounded(keyless, path, salt):
    for name in ("cache_salt", "extra_key") if path == "/generate" else ("cache_salt",):
        answer = keyless.post(None, path, **GENERATING[path], **{name: salt})
        assert answer.status_code == 400
        error = error_of(answer)
        assert error["param"] in ((name, None) if salt == "\ud800" else (name,))


@pytest.mark.parametrize("salt", ["a", "é" * 256, "\0", "bob", None])
def test_salts_of_any_text(keyless, salt):
    for path, body in GENERATING.items():
        assert namespace_of(keyless, keyless.post(None, path, **body, cache_salt=salt)) == Namespace(salt=salt or "")


def test_an_extra_key_is_a_salt(site):
    body = GENERATING["/generate"]
    for given in ({"extra_key": "s"}, {"cache_salt": "s"}, {"cache_salt": "s", "extra_key": "s"}):
        assert namespace_of(site, site.post("ann", "/generate", **body, **given)) == Namespace(tenant="ann", salt="s")
    answer = site.post("ann", "/generate", **body, cache_salt="s", extra_key="t")
    assert (answer.status_code, error_of(answer)["param"]) == (400, "extra_key")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_stream_has_its_id_and_namespace(site, path):
    answer = site.post("bob", path, **GENERATING[path], stream=True)
    assert namespace_of(site, answer) == Namespace(tenant="bob")
    first = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))
    if path != "/generate":
        assert first["id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", GENERATING)
def test_every_prompt_of_a_batch_is_the_same_tenants(site, path):
    name = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/generate": "text"}.get(path)
    if name is not None:
        answer = site.post("ann", path, **{**GENERATING[path], name: ["a", "b", "c"]}, cache_salt="s")
        id = answer.headers["x-request-id"]
        found = {i: site.engine.namespaces.get(f"{id}-{i}") for i in range(4)}
        assert found == {**dict.fromkeys(range(3), Namespace(tenant="ann", salt="s")), 3: None}

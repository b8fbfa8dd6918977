"""The page's files: a strict content security policy, no outside host, and no key needed."""

import gzip
import re

import httpx
import pytest
from embedded_model_server import run_app, service_of, small_engine
from multi_tenant_server import refused

from quire.server.app import make_app
from quire.server.options import ServerOptions
from quire.server.page import FILES

HTML = ("/", "/docs")
DOCS = ("docs.html", "docs.js", "docs.css")


@pytest.mark.parametrize("path", HTML)
def test_pages_allow_nothing_but_their_own_files(site, path):
    answer = httpx.get(site.url + path)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'none'",
        **{f"{kind}-src": "'self'" for kind in ("script", "style", "connect", "font")},
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", [path for path in FILES.rglob("*") if path.suffix in (".html", ".js", ".css")])
def test_no_file_needs_another_host_or_code_in_the_document(path):
    text = path.read_text()
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
        assert not re.search(r"(?:src|href)=\"(?:/|https?:)", text), "links are relative, for --root-path"
    if path.parent == FILES:
        assert not re.search(r"import[^;]*['\"]https?:|url\(['\"]?https?:|fetch\([`'\"]https?:", text)
        assert "innerHTML" not in text or path.name not in DOCS


def test_the_page_of_the_routes_is_small():
    assert sum((FILES / name).stat().st_size for name in DOCS) < 15_000


def test_files_have_types_tags_and_compression(site):
    url = f"{site.url}/page/docs.js"
    plain = httpx.get(url, headers={"accept-encoding": "identity"})
    assert plain.text == (FILES / "docs.js").read_text()
    assert plain.headers["content-type"] == "text/javascript; charset=utf-8"
    with httpx.stream("GET", url, headers={"accept-encoding": "br, gzip"}) as packed:
        assert packed.headers["content-encoding"] == "gzip" and packed.headers["vary"] == "accept-encoding"
        assert gzip.decompress(b"".join(packed.iter_raw())) == plain.content
    assert httpx.get(url, headers={"accept-encoding": "gzip;q=0"}).headers.get("content-encoding") is None
    for encoding, answer in (("identity", plain), ("gzip", packed)):
        tag = answer.headers["etag"]
        again = httpx.get(url, headers={"accept-encoding": encoding, "if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")
        assert "content-security-policy" in again.headers
    assert plain.headers["etag"] != packed.headers["etag"]
    assert httpx.get(url, headers={"if-none-match": '"other"'}).status_code == 200
    assert httpx.get(f"{site.url}/page/docs.css").headers["content-type"] == "text/css; charset=utf-8"


@pytest.mark.parametrize("name", ["no.js", "", "%2e%2e/demo_model/config.json", "..%2f..%2fcli.py"])
def test_other_paths_below_page_are_a_404(site, name):
    refused(httpx.get(f"{site.url}/page/{name}"), 404, "route_not_found")


def test_mode_json_has_model_and_version_for_authenticated_callers_only(site, keyless):
    unknown = httpx.get(f"{site.url}/page/mode.json").json()
    assert unknown == {"mode": "live", "keys": True, "model": "", "version": "", "replicas": 1}
    known = site.ask("ann", "GET", "/page/mode.json").json()
    assert known["model"] == "quire-demo" and known["version"] == httpx.get(f"{keyless.url}/version").json()["version"]
    assert httpx.get(f"{keyless.url}/page/mode.json").json() == {**known, "keys": False}
    away = httpx.get(f"{keyless.url}/page/mode.json", headers={"host": "rebound.example"}).json()
    assert away["model"] == ""


def test_redoc_is_not_served_and_openapi_json_needs_a_key(site):
    for path in ("/redoc", "/docs/oauth2-redirect"):
        assert site.ask("ann", "GET", path).status_code == 404
    refused(httpx.get(f"{site.url}/openapi.json"), 401, "invalid_api_key")


def test_the_page_works_below_a_root_path():
    app = make_app(service_of(small_engine()), options=ServerOptions(root_path="/llm"))
    with run_app(app) as url:
        for path in ("/llm/", "/llm/docs", "/llm/page/docs.js", "/llm/page/mode.json"):
            assert httpx.get(url + path).status_code == 200
        without_slash = httpx.get(f"{url}/llm")
        assert (without_slash.status_code, without_slash.headers["location"]) == (307, "/llm/")

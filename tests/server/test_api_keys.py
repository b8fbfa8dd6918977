"""API keys: validation of their file, the tenant of a key, and the command that creates keys."""

import gc
import hashlib
import json
import re
import stat
import sys
from contextlib import nullcontext

import httpx
import pytest
from embedded_model_server import run_app, service_of, small_engine
from typer.testing import CliRunner

from quire.cli import app, main
from quire.config import EngineOptions
from quire.core.request import Namespace
from quire.errors import ConfigError
from quire.server import api_keys as module
from quire.server import serve as serving
from quire.server.api_keys import MAX_KEYS, Caller, Keys, add_key, new_key, read_keys
from quire.server.options import ServerOptions


def entry(key, tenant="acme", **more):
    return {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **more}


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "keys.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return write


def test_a_key_speaks_for_its_tenant(written):
    path = written({"keys": [entry("one"), entry("two", "bob"), entry("three", "root", role="admin")]})
    keys = read_keys(path)
    assert keys.caller(b"one") == Caller("acme", "user")
    assert keys.caller(b"two") == Caller("bob", "user")
    assert keys.caller(b"three") == Caller("root", "admin")
    assert [keys.caller(wrong) for wrong in (b"", b"four", b"on", b"One", b"one ", b"\xff")] == [None] * 6
    assert str(keys) == "3 API keys of 3 tenants, 1 of them with the role admin"


def test_hashes_may_be_written_in_capitals(written):
    one = entry("one")
    assert read_keys(written({"keys": [{**one, "sha256": one["sha256"].upper()}]})).caller(b"one").tenant == "acme"


def test_a_salt_narrows_a_tenant_and_cannot_become_one():
    caller = Caller("acme", "user")
    assert caller.namespace() == caller.namespace(None) == Namespace(tenant="acme")
    assert caller.namespace("bob") == Namespace(tenant="acme", salt="bob")


@pytest.mark.parametrize("key", [b"k0", b"k63", b"wrong", b""])
def test_every_entry_is_compared_whatever_the_key(monkeypatch, key):
    compared = []

    def compare(known, digest):
        compared.append(known)
        assert len(known) == len(digest) == 32
        return known == digest

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    keys = Keys([new_key("other", "user")[1] for _ in range(64)])
    keys.caller(key)
    assert len(compared) == 64


HASH = "0" * 64


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff", "wrong"),
        (b"[]", r"Expected `object`"),
        ({}, "missing required field `keys`"),
        ({"keys": []}, "lists no keys"),
        ({"keys": {}}, r"\$\.keys"),
        ({"keys": [3]}, r"\$\.keys\[0\]"),
        ({"keys": [], "more": 1}, "more"),
        ({"keys": [{"tenant": "a"}]}, r"sha256.*\$\.keys\[0\]"),
        ({"keys": [{"sha256": HASH}]}, r"tenant.*\$\.keys\[0\]"),
        ({"keys": [{"sha256": HASH, "tenant": ""}]}, r"tenant.* 1 to 128 .*\$\.keys\[0\]"),
        ({"keys": [{"sha256": HASH, "tenant": "a" * 129}]}, r"tenant.* 1 to 128 .*\$\.keys\[0\]"),
        ({"keys": [{"sha256": HASH, "tenant": "\0public"}]}, r"tenant.*printable.*\$\.keys\[0\]"),
        ({"keys": [entry("")]}, r"empty key.*\$\.keys\[0\]"),
        ({"keys": [{**entry(""), "sha256": entry("")["sha256"].upper()}]}, "empty key"),
        ({"keys": [{"sha256": HASH, "tenant": 3}]}, r"\$\.keys\[0\]\.tenant"),
        ({"keys": [{"sha256": HASH, "tenant": "a", "adapters": "x"}]}, r"\$\.keys\[0\]\.adapters"),
        ({"keys": [{"sha256": HASH, "tenant": "a", "adapters": [""]}]}, r"adapters .* 1 to 256 .*\$\.keys\[0\]"),
        ({"keys": [{"sha256": HASH, "tenant": "a", "adapters": ["x" * 257]}]}, r"adapters .* 1 to 256 "),
        ({"keys": [{"sha256": HASH, "tenant": "a", "adapters": ["x"] * 1025}]}, r"adapters .* 1,024 "),
        ({"keys": [{"sha256": HASH[1:], "tenant": "a"}]}, r"\$\.keys\[0\]\.sha256"),
        ({"keys": [{"sha256": HASH + "\n", "tenant": "a"}]}, r"\$\.keys\[0\]\.sha256"),
        ({"keys": [{"sha256": "qk-a-key-as-it-is", "tenant": "a"}]}, r"\$\.keys\[0\]\.sha256"),
        ({"keys": [{"sha256": HASH, "tenant": "a"}, {"sha256": HASH, "tenant": "b", "role": ""}]}, r"keys\[1\]\.role"),
        ({"keys": [{"sha256": HASH, "tenant": "a", "rôle": "admin"}]}, "rôle"),
        ({"keys": [{"sha256": HASH, "tenant": "a"}, {"sha256": HASH, "tenant": "b"}]}, r"keys\[0\] and keys\[1\]"),
        (b'{"keys": [{"sha256": "' + b"0" * 64 + b'", "tenant": "\\ud800"}]}', "wrong"),
        (b'{"keys": ' + b"[" * 100_000, "wrong"),
        ({"keys": [{"sha256": f"{i:064x}", "tenant": "a"} for i in range(MAX_KEYS + 1)]}, str(MAX_KEYS)),
        (b" " * (4 * 2**20 + 1), "longer than"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_what_and_where(written, content, says):
    path = written(content)
    with pytest.raises(ConfigError, match=says) as refused:
        read_keys(path)
    assert str(path) in str(refused.value)
    assert "qk-a-key" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="quire key TENANT --file"):
        read_keys(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="Is a directory") as other:
        read_keys(tmp_path)
    assert "creates it" not in str(other.value)


def test_links_that_lead_nowhere(tmp_path):
    link, loop = tmp_path / "link.json", tmp_path / "loop.json"
    loop.symlink_to(loop)
    link.symlink_to(tmp_path / "new.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(loop)
    with pytest.raises(ConfigError, match="leads to itself"):
        add_key(loop, new_key("acme", "user")[1])
    assert loop.is_symlink()
    add_key(link, new_key("acme", "user")[1])
    assert link.is_symlink()
    assert str(read_keys(tmp_path / "new.json")).startswith("1 API keys")


def test_a_key_may_be_limited_to_adapters(written, tmp_path):
    path = written({"keys": [entry("one", adapters=["a", "team/b"]), entry("two", adapters=[]), entry("three")]})
    one, two, three = map(read_keys(path).caller, (b"one", b"two", b"three"))
    assert (one.adapters, two.adapters, three.adapters) == ({"a", "team/b"}, set(), None)
    assert list(map(one.may_use_adapter, ("a", "team/b", "b", "A", ""))) == [True, True, False, False, False]
    assert not two.may_use_adapter("a")
    assert three.may_use_adapter("a")
    made = tmp_path / "made.json"
    for names, stored in (("a, team/b,", ["a", "team/b"]), ("", [])):
        done = CliRunner().invoke(app, ["key", "acme", "--adapters", names, "--file", str(made)])
        assert done.exit_code == 0
        assert json.loads(made.read_text())["keys"][-1]["adapters"] == stored
    assert CliRunner().invoke(app, ["key", "acme", "--file", str(made)]).exit_code == 0
    assert "adapters" not in json.loads(made.read_text())["keys"][-1]


def test_an_empty_key_is_nobodys():
    class Entry:
        sha256 = entry("")["sha256"]

        @staticmethod
        def caller():
            return Caller("acme", "admin")

    assert Keys([Entry]).caller(b"") is None


def test_keys_are_added_one_by_one(tmp_path):
    path = tmp_path / "keys.json"
    made = [new_key("acme", "user"), new_key("bob", "user"), new_key("root", "admin")]
    for _, one in made:
        add_key(path, one)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [read_keys(path).caller(key.encode()).tenant for key, _ in made] == ["acme", "bob", "root"]
    assert not any(key in path.read_text() for key, _ in made)
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path):
    path, link = tmp_path / "keys.json", tmp_path / "link.json"
    link.symlink_to(path)
    add_key(link, new_key("acme", "user")[1])
    path.chmod(0o640)
    add_key(link, new_key("bob", "user")[1])
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert str(read_keys(path)).startswith("2 API keys of 2 tenants")


def test_add_key_does_not_change_a_bad_or_full_file(written, tmp_path):
    path = written(b"{")
    with pytest.raises(ConfigError, match="truncated"):
        add_key(path, new_key("acme", "user")[1])
    assert path.read_bytes() == b"{"
    full = written({"keys": [{"sha256": f"{i:064x}", "tenant": "a"} for i in range(MAX_KEYS)]})
    with pytest.raises(ConfigError, match="no longer used"):
        add_key(full, new_key("acme", "user")[1])
    with pytest.raises(ConfigError, match="cannot be written"):
        add_key(tmp_path / "no" / "folder", new_key("acme", "user")[1])


@pytest.mark.parametrize("tenant", ["", "a" * 129, "\ud800", "\0public", "a\nb", " ", "\u00a0", "\u202ea"])
def test_names_of_tenants_are_bounded(tenant):
    with pytest.raises(ConfigError, match="1 to 128"):
        new_key(tenant, "user")


def test_entries_may_have_limits(written):
    limited = entry("one", requests_per_minute=5, tokens_per_minute=70)
    keys = read_keys(written({"keys": [limited, entry("two", requests_per_minute=1), entry("three")]}))
    headers_of = [keys.caller(key).quota.headers() for key in (b"one", b"two", b"three")]
    assert [len(headers) for headers in headers_of] == [6, 3, 0]
    assert (headers_of[0]["x-ratelimit-limit-requests"], headers_of[0]["x-ratelimit-limit-tokens"]) == ("5", "70")
    assert keys.caller(b"one").quota is keys.caller(b"one").quota
    assert str(keys).endswith("with the role admin, 2 with limits")
    for wrong in (0, -1, 10**9 + 1, 1.5, "3", None):
        with pytest.raises(ConfigError, match=r"keys\[0\]\.requests_per_minute"):
            read_keys(written({"keys": [entry("one", requests_per_minute=wrong)]}))


def test_the_command_writes_limits(tmp_path):
    path = tmp_path / "keys.json"
    flags = ["--requests-per-minute", "5", "--tokens-per-minute", "70", "--file", str(path)]
    CliRunner().invoke(app, ["key", "acme", *flags], catch_exceptions=False)
    CliRunner().invoke(app, ["key", "bob", "--file", str(path)], catch_exceptions=False)
    first, second = json.loads(path.read_text())["keys"]
    assert (first["requests_per_minute"], first["tokens_per_minute"]) == (5, 70)
    assert set(second) == {"sha256", "tenant", "role"}
    assert str(read_keys(path)).endswith(", 1 with limits")
    assert CliRunner().invoke(app, ["key", "acme", "--requests-per-minute", "0"]).exit_code == 2


def test_keys_are_all_different():
    keys = {new_key("acme", "user")[0] for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("qk-") and len(key) == 46 for key in keys)


def test_the_command_prints_a_key_and_its_entry():
    key, shown = CliRunner().invoke(app, ["key", "acme"], catch_exceptions=False).stdout.splitlines()
    assert json.loads(shown) == entry(key, role="user")


def test_the_command_adds_to_a_file_and_prints_the_key_once(tmp_path):
    path = tmp_path / "keys.json"
    result = CliRunner().invoke(app, ["key", "acme", "--role", "admin", "--file", str(path)], catch_exceptions=False)
    (key,) = result.stdout.splitlines()
    assert read_keys(path).caller(key.encode()) == Caller("acme", "admin")
    assert key not in result.stderr
    assert "after a restart" in result.stderr
    assert CliRunner().invoke(app, ["key", "acme", "--role", "root"]).exit_code == 2


@pytest.fixture
def served(monkeypatch):
    """Reports of `serve` with a server that does not listen, and the app that it would run."""

    def serve(policy=None, **more):
        lines = []

        class Server:
            def __init__(self, config, *, ready, **_more):
                self.app, self.ready = config.app, ready

            def run(self, sockets):
                self.ready()
                lines.append(self.app)

        def launched(options, *_, **__):
            serve.options = options
            return nullcontext(service_of(small_engine()))

        monkeypatch.setattr(serving, "launched", launched)
        monkeypatch.setattr(serving, "GracefulServer", Server)
        options = EngineOptions(policy=policy)
        try:
            serving.serve(options, ServerOptions(port=0, **more), report=lines.append, progress=print)
        finally:
            gc.unfreeze()
        *printed, app = lines
        return printed, app

    return serve


def test_with_keys_other_machines_are_served(served, tmp_path):
    path = tmp_path / "keys.json"
    key, one = new_key("acme", "user")
    add_key(path, one)
    printed, app = served(host="0.0.0.0", api_key_file=str(path))
    assert printed[0] == "keys       1 API keys of 1 tenants, 0 of them with the role admin"
    assert "-H 'authorization: Bearer KEY'" in printed[-1]
    with run_app(app) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_the_api_key_option_serves_one_admin_key_without_a_file(served, tmp_path):
    printed, app = served(host="0.0.0.0", api_key="sk-of-docker")
    assert printed[0] == "keys       1 API keys of 1 tenants, 1 of them with the role admin"
    assert re.search(r"try: curl http://127\.0\.0\.1:\d+/", printed[-1])  # 0.0.0.0 is to listen on only
    assert "http://0.0.0.0:" in printed[-2]
    with run_app(app) as url:
        docker = {"host": "host.docker.internal:8000"}
        assert httpx.get(f"{url}/v1/models", headers=docker).status_code == 401
        key = {"authorization": "Bearer sk-of-docker"}
        assert httpx.get(f"{url}/v1/models", headers=docker | key).status_code == 200
        assert httpx.get(f"{url}/metrics", headers=key).status_code == 200
    for wrong in ("short", "with a space", "schlüssel-von-docker", ""):
        with pytest.raises(ConfigError, match="at least 8 ASCII characters"):
            served(api_key=wrong)
    with pytest.raises(ConfigError, match="give one"):
        served(api_key="sk-of-docker", api_key_file=str(tmp_path / "keys.json"))
    assert "sk-of-docker" not in repr(ServerOptions(api_key="sk-of-docker"))


def test_without_keys_this_machine_is_served(served):
    printed, app = served(host="127.0.0.1")
    assert "Bearer" not in "".join(printed)
    assert re.search(r"page at (http://127\.0\.0\.1:\d+)/, .* routes at \1/docs", printed[-2])
    with run_app(app) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 200
    with pytest.raises(ConfigError, match="--api-key-file"):
        served(host="0.0.0.0")


@pytest.mark.parametrize(
    ("tenants", "option", "policy", "reason"),
    [
        (("acme", "beta", "beta"), None, "fair", "the API keys name 2 tenants"),
        (("acme", "beta"), "fcfs", "fcfs", "as the option says"),
        (("acme", "acme"), None, "fcfs", "the API keys name one tenant"),
        ((), None, "fcfs", "no API keys tell tenants apart"),
        ((), "priority", "priority", "as the option says"),
    ],
)
def test_keys_of_several_tenants_make_fair_the_default_policy(served, tmp_path, tenants, option, policy, reason):
    path = tmp_path / "keys.json"
    for tenant in tenants:
        add_key(path, new_key(tenant, "user")[1])
    printed, _ = served(policy=option, **({"api_key_file": str(path)} if tenants else {}))
    assert [line for line in printed if line.startswith("policy")] == [f"policy     {policy}: {reason}"]
    assert served.options.policy == policy


def test_a_bad_key_file_is_an_error_before_the_model_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(serving, "launched", None)
    with pytest.raises(ConfigError, match="does not exist"):
        serving.serve(
            EngineOptions(), ServerOptions(port=0, api_key_file=str(tmp_path / "none")), report=print, progress=print
        )


def test_flags_of_the_server(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "quire.serve", lambda options, server, **more: seen.update(options=options, server=server), raising=False
    )

    def serve(*flags):
        assert CliRunner().invoke(app, ["serve", *flags], catch_exceptions=False).exit_code == 0
        return seen["options"]

    options = serve("--api-key-file", "keys.json", "--public-prefixes", "p.json", "--prefix-index", "hash")
    assert seen["server"].api_key_file == "keys.json"
    assert (options.public_prefixes, options.prefix_index) == ("p.json", "hash")
    assert serve("--enable-prefix-caching").enable_prefix_caching
    assert not serve("--no-enable-prefix-caching").enable_prefix_caching
    assert seen["server"].api_key_file is None
    monkeypatch.setenv("QUIRE_API_KEY", "of-the-environment")
    serve()
    assert seen["server"].api_key == "of-the-environment"
    serve("--api-key", "of-the-line")
    assert seen["server"].api_key == "of-the-line"


def test_the_command_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quire", "key", "a" * 200])
    with pytest.raises(SystemExit):
        main()
    assert "tenant" in capsys.readouterr().err

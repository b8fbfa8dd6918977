"""Location and download of model files, with a small Hub on the loopback interface. No test uses a real network."""

import json
import random
import socket
import time
from pathlib import Path

import huggingface_hub
import pytest
from hf_hub_server import Repo, serve_hub

from quire.errors import ConfigError, ModelError
from quire.hub import download
from quire.hub import repository as hub_module
from quire.hub.locate import locate
from quire.hub.names import HubName
from quire.hub.repository import gguf_files, small_files

WEIGHTS = random.Random(1).randbytes(3_000_000)
INDEX = "model.safetensors.index.json"
FILES = {
    "config.json": b'{"architectures": []}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"model": 1}' * 200,
    "tokenizer_config.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model.safetensors": WEIGHTS,
    "README.md": b"# about",
    "pytorch_model.bin": b"\x80\x02" * 1000,
    "consolidated.safetensors": WEIGHTS[::-1],
    "original/params.json": b"{}",
    "onnx/model.onnx": b"onnx" * 1000,
}
NEEDED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
          "additional_chat_templates/tool_use.jinja", "model.safetensors"}  # fmt: skip
GGUFS = {
    "README.md": b"",
    "tiny-Q4_K_M.gguf": WEIGHTS[:5000],
    "tiny-Q4_K_S.gguf": WEIGHTS[:4000],
    "tiny-IQ4_XS.gguf": WEIGHTS[:3000],
    "mmproj-Q8_0.gguf": WEIGHTS[:2500],
    "Q8_0/tiny-Q8_0-00001-of-00002.gguf": WEIGHTS[5000:9000],
    "Q8_0/tiny-Q8_0-00002-of-00002.gguf": WEIGHTS[9000:12000],
}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(download, "_PAUSE", 0.001)
    monkeypatch.setattr(hub_module, "get_token", lambda: None)
    with serve_hub() as server:
        server.repos["owner/tiny"] = Repo(dict(FILES))
        server.repos["owner/tiny-GGUF"] = Repo(dict(GGUFS))
        yield server


@pytest.fixture
def find(hub, tmp_path):
    """`locate` with the small Hub and an empty cache. Its reports are in `find.lines` and `find.bytes`."""

    def call(model, **options):
        return locate(
            model,
            **{"endpoint": hub.url, "cache_dir": str(tmp_path / "cache"), **options},
            report=call.lines.append,
            progress=lambda done, total: call.bytes.append((done, total)),
        )

    call.lines, call.bytes = [], []
    return call


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# Local files


def test_a_local_folder_or_gguf_file_is_used_without_a_download(find, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert find(str(tmp_path)) == tmp_path
    assert find(str(file), offline=True) == file
    with pytest.raises(ConfigError, match="revision 'main' is for ids on the Hub"):
        find(str(tmp_path), revision="main")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"neither a folder nor a .gguf file"):
        find(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "name",
    ["./modle", "modle", "../nowhere", "models/tny", "~/quire-no-such", "/no/such/place", "a\\b", "a/b/", "", "a b/c",
     "a/b/c", "a--b/c", "a/b..c", "owner/tiny.git", "tiny.gguf", "folder/tiny.gguf", "owner/tiny:a/b", "x" * 5000,
     "owner/" + "x" * 97, "\0", "-a/b", "a/b/c.gguf:Q8_0", "owner/tiny@a:b:c", "https://huggingface.co/owner/tiny",
     "~no-such-user/x"],
)  # fmt: skip
def test_a_slip_in_a_path_is_not_sent_over_the_network(find, hub, tmp_path, monkeypatch, name):
    for folder in ("model", "models/tiny"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"there is no folder or .gguf file"):
        find(name)
    assert hub.requests == []


def test_the_nearest_name_is_offered(find, tmp_path, monkeypatch):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"'./models/tny' \(did you mean 'tiny'\?\)"):
        find("./models/tny")
    with pytest.raises(ModelError, match=r"\(did you mean 'models'\?\)"):
        find("model")


def test_a_folder_of_the_owners_name_does_not_hide_a_revision(find, tmp_path, monkeypatch):
    (tmp_path / "owner").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (find("owner/tiny@main") / "config.json").is_file()


@pytest.mark.parametrize("revision", ["a..b", "a b", "-x", "/x", "x/", "~1", "a\\b", "a:b?"])
def test_revisions_that_cannot_be_are_not_sent(find, hub, revision):
    with pytest.raises(ModelError, match="cannot be a revision"):
        find("owner/tiny", revision=revision)
    assert hub.requests == []


def test_two_revisions(find):
    with pytest.raises(ConfigError, match="names the revision 'a', the option 'b'; give one"):
        find("owner/tiny@a", revision="b")


# From the Hub


@pytest.mark.parametrize(
    ("card", "named"),
    [
        ({"license": "apache-2.0"}, "licence apache-2.0"),
        ({"license": "other", "license_name": "llama3"}, "licence llama3"),
        ({"license": ["mit", 3]}, "no licence named"),
        (None, "no licence named"),
    ],
)
def test_the_licence_of_the_model_card_is_reported(card, named, find, hub):
    hub.repos["owner/tiny"].card = card
    find("owner/tiny")
    assert f" GB, {named}, to " in find.lines[-1]


def test_only_what_is_needed_is_downloaded(find, hub):
    folder = find("owner/tiny")
    assert files_in(folder) == NEEDED
    for name in NEEDED:
        assert (folder / name).read_bytes() == FILES[name]
    assert folder.name == "c" * 40
    assert "downloading owner/tiny" in find.lines[-1]
    assert find.bytes[-1] == (len(WEIGHTS), len(WEIGHTS))
    assert [done for done, total in find.bytes if total == len(WEIGHTS)] == sorted(
        done for done, total in find.bytes if total == len(WEIGHTS)
    )
    assert not hub.asked("GET", "README") + hub.asked("GET", "original")


def test_the_second_time_costs_one_request(find, hub):
    first = find("owner/tiny")
    hub.requests.clear(), find.lines.clear(), find.bytes.clear()
    assert find("owner/tiny") == first
    assert [path for _, path, _ in hub.requests] == ["/api/models/owner/tiny/revision/main"]
    assert find.lines == find.bytes == []


def test_the_cache_is_the_librarys(find, hub, tmp_path):
    find("owner/tiny")
    theirs = huggingface_hub.hf_hub_download(
        "owner/tiny", "model.safetensors", cache_dir=tmp_path / "cache", local_files_only=True
    )
    assert Path(theirs).read_bytes() == WEIGHTS


def test_shards_are_those_of_the_index(find, hub):
    shards = {f"part-{i}.safetensors": WEIGHTS[i * 2000 : i * 2000 + 1500] for i in range(3)}
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(shards)}}
    hub.repos["owner/tiny"].files = {
        "config.json": b"{}", INDEX: json.dumps(index).encode(), "other.safetensors": WEIGHTS, **shards,
    }  # fmt: skip
    assert files_in(find("owner/tiny")) == {"config.json", INDEX, *shards}


def test_the_modules_of_an_embedding_model_are_downloaded(find, hub):
    paths = {"0": "", "1": "1_Pooling", "2": "2_Dense", "3": "3_Normalize"}
    modules = [{"idx": int(idx), "name": idx, "path": path, "type": "T"} for idx, path in paths.items()]
    needed = {
        "modules.json": json.dumps(modules).encode(),
        "config_sentence_transformers.json": b"{}",
        "sentence_bert_config.json": b"{}",
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": WEIGHTS[:3000],
    }
    others = {"2_Dense/pytorch_model.bin": WEIGHTS, "9_Dense/model.safetensors": WEIGHTS}
    hub.repos["owner/tiny"].files = {**FILES, **needed, **others}
    folder = find("owner/tiny")
    assert files_in(folder) == NEEDED | needed.keys()
    assert (folder / "2_Dense/model.safetensors").read_bytes() == WEIGHTS[:3000]
    hub.requests.clear()
    assert find("owner/tiny") == folder
    assert len(hub.requests) == 1


def test_a_bare_name_and_a_revision(find, hub):
    hub.repos["gpt2"] = Repo(dict(FILES), commit="d" * 40, revisions=("main", "v1", "refs/pr/7"))
    assert find("gpt2").name == "d" * 40
    assert find("gpt2@v1").name == find("gpt2", revision="v1").name == find("gpt2@refs/pr/7").name == "d" * 40
    assert find("gpt2", revision="d" * 40).name == "d" * 40


def test_a_branch_that_moves_on_is_followed_and_a_commit_is_not(find, hub):
    first = find("owner/tiny")
    hub.repos["owner/tiny"] = Repo(FILES | {"config.json": b'{"new": 1}'}, commit="e" * 40)
    second = find("owner/tiny")
    assert (first.name, second.name) == ("c" * 40, "e" * 40)
    assert (second / "config.json").read_bytes() == b'{"new": 1}'
    assert find("owner/tiny", revision="c" * 40, offline=True) == first


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/tiny-GGUF:Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("owner/tiny-GGUF:q4_k_s", "tiny-Q4_K_S.gguf"),
        ("owner/tiny-GGUF@main:IQ4_XS", "tiny-IQ4_XS.gguf"),
        ("owner/tiny-GGUF/tiny-Q4_K_S.gguf", "tiny-Q4_K_S.gguf"),
        ("owner/tiny-GGUF:Q8_0", "Q8_0/tiny-Q8_0-00001-of-00002.gguf"),
        ("owner/tiny-GGUF/Q8_0/tiny-Q8_0-00002-of-00002.gguf", "Q8_0/tiny-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_a_gguf_file_of_a_repository(find, hub, name, expected):
    found = find(name)
    folder = found.parents[expected.count("/")]
    assert found == folder / expected
    assert found.read_bytes() == GGUFS[expected]
    assert files_in(folder) == {path for path in GGUFS if path.partition("-0000")[0] == expected.partition("-0000")[0]}
    hub.requests.clear()
    assert find(name, offline=True) == found
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/tiny-GGUF:Q4_K", "has no GGUF file Q4_K; there are Q8_0/tiny-Q8_0.gguf, tiny-IQ4_XS.gguf, tiny-Q4_K_M"),
        ("owner/tiny-GGUF:tiny", "has several files called tiny; there are"),
        ("owner/tiny-GGUF/tiny-Q4_K_X.gguf", r"has no file tiny-Q4_K_X.gguf \(did you mean 'tiny-Q4_K_"),
        ("owner/tiny-GGUF", "has its weights as GGUF; choose a file, as in owner/tiny-GGUF:Q4_K_M; there are Q8_0/"),
        ("owner/tiny:Q8_0", "has no GGUF file Q8_0; it has no GGUF files"),
    ],
)
def test_gguf_files_that_are_not_there(find, name, message):
    with pytest.raises(ModelError, match=message):
        find(name)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"only as pickles \(pytorch_model.bin\), which can run code"),
        (["model.safetensors"], "no config.json"),
        (["config.json"], "no weights"),
    ],
)
def test_repositories_that_quire_cannot_use(names, message):
    with pytest.raises(ModelError, match=message):
        small_files(HubName("a/b"), names)


def test_no_file_is_meant_where_none_is_named():
    assert gguf_files(HubName("a/b"), GGUFS) == []


# Interrupted


@pytest.mark.parametrize("cuts", [[1], [1_000_000], [2_999_999], [500_000, 0, 0, 700_000, 1]])
def test_a_download_that_is_cut_goes_on_where_it_was(find, hub, cuts):
    hub.repos["owner/tiny"].files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    hub.cuts = list(cuts)
    folder = find("owner/tiny")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [headers["range"] for headers in hub.asked("GET", "/storage")]
    positions = [sum(cuts[:i]) for i in range(len(cuts) + 1)]
    assert ranges == [f"bytes={position}-" for position in positions]
    assert find.bytes[-1] == (len(WEIGHTS), len(WEIGHTS))


def test_a_download_goes_on_in_another_process(find, hub, tmp_path):
    hub.repos["owner/tiny"].files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    hub.cuts = [1_500_000] + [0] * 5
    with pytest.raises(ModelError, match="Downloaded parts are kept"):
        find("owner/tiny")
    with pytest.raises(ModelError, match="not in the cache, or only a part of it"):
        find("owner/tiny", offline=True)
    hub.requests.clear()
    assert (find("owner/tiny") / "model.safetensors").read_bytes() == WEIGHTS
    assert [headers["range"] for headers in hub.asked("GET", "/storage")] == ["bytes=1500000-"]
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_server_without_ranges_begins_again(find, hub):
    hub.ignores_ranges = True
    hub.cuts = [700_000]
    assert (find("owner/tiny") / "model.safetensors").read_bytes() == WEIGHTS


def test_other_bytes_than_listed_are_not_kept(find, hub, tmp_path):
    hub.repos["owner/tiny"].files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    hub.spoils = True
    with pytest.raises(ModelError, match="is not the file that the repository lists"):
        find("owner/tiny")
    hub.spoils = False
    assert (find("owner/tiny") / "model.safetensors").read_bytes() == WEIGHTS


# Offline


def test_offline_uses_the_local_copy_and_sends_no_request(find, hub):
    online = find("owner/tiny")
    hub.requests.clear()
    assert find("owner/tiny", offline=True) == online
    assert hub.requests == []


def test_offline_without_a_copy(find, hub):
    with pytest.raises(ModelError, match=r"owner/tiny is not in the cache.*run once without offline"):
        find("owner/tiny", offline=True)
    assert hub.requests == []


def test_without_a_network_the_copy_is_taken_and_it_says_so(find):
    online = find("owner/tiny")
    assert find("owner/tiny", endpoint=f"http://127.0.0.1:{closed_port()}") == online
    assert find.lines[-1] == "the Hub cannot be reached; owner/tiny is taken from the cache"


def test_without_network_and_local_copy_the_error_comes_within_5_seconds(find):
    def seconds(says, **options):
        begin = time.monotonic()
        with pytest.raises(ModelError, match=f"owner/tiny is not {says}"):
            find("owner/tiny", **options)
        return time.monotonic() - begin

    offline = seconds("in the cache", offline=True)  # on a machine that may be busy
    unreachable = {"endpoint": f"http://127.0.0.1:{closed_port()}"}
    assert seconds("on this machine, and the Hub cannot be reached", **unreachable) < 5 + 20 * offline


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# Errors


def test_refusals_say_what_to_do(find, hub, monkeypatch):
    with pytest.raises(ModelError, match=r"no model 'owner/none' on the Hub, or it is private; .*HF_TOKEN"):
        find("owner/none")
    with pytest.raises(ModelError, match="owner/tiny has no revision 'v9'; give a branch"):
        find("owner/tiny@v9")
    hub.repos["owner/tiny"].refusal = "GatedRepo"
    with pytest.raises(ModelError, match=r"owner/tiny is gated: accept its terms.*HF_TOKEN"):
        find("owner/tiny")
    for status, message in ((401, "refused owner/tiny"), (429, "limiting requests"), (500, "status 500")):
        hub.status = status
        with pytest.raises(ModelError, match=message):
            find("owner/tiny")


def test_an_endpoint_that_is_not_the_hub_is_a_model_error(find, hub):
    hub.status = 200
    with pytest.raises(ModelError, match="does not answer as the Hugging Face Hub does"):
        find("owner/tiny")


def test_paths_in_a_listing_that_lead_out_of_the_cache(find, hub, tmp_path):
    hub.repos["owner/tiny-GGUF"].files = {"../../../../x-Q4_0.gguf": WEIGHTS}
    with pytest.raises(ModelError, match="unsafe"):
        find("owner/tiny-GGUF:Q4_0")
    assert not list(tmp_path.rglob("x-Q4_0.gguf"))


def test_the_token_goes_to_the_hub_and_not_to_its_storage(find, hub, monkeypatch):
    hub.repos["owner/tiny"] = Repo(dict(FILES), refusal="RepoNotFound")
    monkeypatch.setattr(hub_module, "get_token", lambda: "good")
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: "good")
    assert (find("owner/tiny") / "model.safetensors").read_bytes() == WEIGHTS
    assert all(headers.get("authorization") == "Bearer good" for headers in hub.asked("GET", "/resolve/"))
    assert hub.asked("GET", "/storage/")
    assert not any("authorization" in headers for headers in hub.asked("GET", "/storage/"))


def test_a_disk_that_is_too_small_is_noticed_before(find, hub, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ModelError, match=r"needs 0.0 GB in .* where 0.0 GB are free; make room"):
        find("owner/tiny")
    assert not hub.asked("GET", "/storage/")


def test_a_cache_that_cannot_be_written(find, hub, tmp_path):
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(ModelError, match="owner/tiny cannot be written to"):
        find("owner/tiny")


def test_a_full_disk_while_writing(find, hub, monkeypatch):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_module, "fetch", full)
    with pytest.raises(ModelError, match="the disk is full; make room"):
        find("owner/tiny")

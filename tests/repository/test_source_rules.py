"""Forbidden content of files, and docstrings of all public definitions.

The checkers read syntax trees, so that a comment may name forbidden code. Each is a function from source text to
errors, and a test below runs it on a source that breaks its rule.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 900
LONG = 600  # lines; a longer file needs a reason here
REASONS: dict[str, str] = {
    "quire/params.py": "the parameters of a request with their bounds, which messages share",
    "quire/server/store.py": "the statements on one set of tables, which keep their sums",
}
VAGUE = {"state", "common", "base", "utils", "fields", "helpers", "misc"}  # names without a subject
CODE = {".py", ".cpp", ".h", ".cu"}

UNSAFE_MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "copyreg"),
}
UNSAFE_CALLS = {
    *("eval", "exec", "compile", "builtins.eval", "builtins.exec", "builtins.compile", "os.system", "os.popen"),
    *("torch.load", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all"),
    *("yaml.unsafe_load", "yaml.unsafe_load_all", "logging.config.listen"),
}
UNSAFE_LOADERS = {"import_module", "__import__"}  # they import a module by its name
UNSAFE_ARGUMENTS = {"shell", "trust_remote_code", "allow_pickle"}

# Modules that pickle what they send to another process.
PICKLING_MODULES = ("multiprocessing", "torch.multiprocessing", "concurrent.futures.process")
PICKLING_NAMES = {
    *("ProcessPoolExecutor", "send_pyobj", "recv_pyobj", "read_pickle", "to_pickle", "SocketHandler"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
}
SIMULATING_PROCESSES = "quire/planner/search.py"  # `quire plan` sends simulations to its own processes: no message

# Environment variables that quire may read: name -> reason.
ENVIRONMENT = {
    "QUIRE_LOG_LEVEL": "how much is logged changes nothing that is computed",
    "QUIRE_API_KEY": "an option is shown in the list of processes; only the command line reads it",
}
SETTABLE = {"GOMP_SPINCOUNT"}  # variables that quire may set, because a library has no other setting

# Text that is valid only on one machine or in one network. Split into pieces, so that this file passes.
PLACES = re.compile(
    r"(?<![\w.~])/(?:root|work|home|Users)/|" + "|".join(["pypi" + r"\.", "index" + "-url", "artifact" + "ory"])
)

TORCH_INDEX = "--" + "index" + "-url https://download.pytorch.org/whl/cpu"  # as in torch's documentation


def unsafe_faults(source: str, path: str) -> Iterator[str]:
    """Code that could execute the content of a file or a request."""
    for node in ast.walk(ast.parse(source)):
        for name in _unsafe_names(node):
            yield f"{path}:{node.lineno}: {name}"


def _unsafe_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names):
            yield from (alias.name for alias in names if alias.name.split(".")[0] in UNSAFE_MODULES)
        case ast.ImportFrom(module=str(module), names=names):
            yield from (f"{module}.{n.name}" for n in names if module.split(".")[0] in UNSAFE_MODULES)
            yield from (f"{module}.{n.name}" for n in names if f"{module}.{n.name}" in UNSAFE_CALLS)
        case ast.Name() | ast.Attribute() if ast.unparse(node) in UNSAFE_CALLS:
            yield ast.unparse(node)
        case ast.keyword(arg=str(name), value=value) if name in UNSAFE_ARGUMENTS:
            if not (isinstance(value, ast.Constant) and value.value is False):
                yield f"{name}={ast.unparse(value)}"
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(function).split(".")[-1] in UNSAFE_LOADERS and name.split(".")[0] in UNSAFE_MODULES:
                yield f"{ast.unparse(function)}({name!r})"


def pickling_faults(source: str, path: str) -> Iterator[str]:
    """Modules and functions that pickle data for another process."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                used = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                used = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute():
                used = [ast.unparse(node)]
            case _:
                continue
        for name in used:
            if any(name == one or name.startswith(f"{one}.") for one in PICKLING_MODULES) or (
                name.split(".")[-1] in PICKLING_NAMES
            ):
                yield f"{path}:{node.lineno}: {name}"


def environment_faults(source: str, path: str) -> Iterator[str]:
    """Uses of environment variables that are not in the list."""
    tree = ast.parse(source)
    fine = [
        node for node in ast.walk(tree) if _variable(node) in ENVIRONMENT or _variable_with_default(node) in SETTABLE
    ]
    allowed = {id(inner) for node in fine for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in allowed:
            continue
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv"):
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (f"{path}:{node.lineno}: os.{n.name}" for n in node.names if n.name in ("environ", "getenv"))
        if isinstance(node, ast.keyword) and node.arg in ("envvar", "auto_envvar_prefix") and not _declared(node.value):
            yield f"{path}:{node.lineno}: {node.arg}"


def _variable(node: ast.AST) -> str:
    """The variable that `os.environ["X"]`, `os.environ.get("X")` or `os.getenv("X")` reads, or ""."""
    match node:
        case ast.Subscript(value=where, slice=ast.Constant(value=str(name)), ctx=ast.Load()):
            return name if ast.unparse(where) == "os.environ" else ""
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            return name if ast.unparse(function) in ("os.environ.get", "os.getenv") else ""
    return ""


def _declared(value: ast.AST) -> bool:
    """Whether the value of `envvar=` is a variable of the list, or the one that an option's Help names."""
    return ast.unparse(value) in ("text.envvar", *map(repr, ENVIRONMENT))


def _variable_with_default(node: ast.AST) -> str:
    """The variable that `os.environ.setdefault("X", ...)` sets for a library, or ""."""
    match node:
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), _]):
            return name if ast.unparse(function) == "os.environ.setdefault" else ""
    return ""


Documented = dict[str, set[str]]  # class -> its methods that have a docstring


def documented(source: str) -> Documented:
    """The documented methods of a file's classes. Overriding methods need no docstring."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return {
        node.name: {m.name for m in node.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)}
        for node in classes
    }


def docstring_faults(source: str, path: str, known: Documented) -> Iterator[str]:
    """Public modules, classes, functions and methods without a docstring."""
    tree = ast.parse(source)
    if not ast.get_docstring(tree):
        yield f"{path}: module"
    for node, inherited in _public(tree.body, known, inherited=set()):
        if not ast.get_docstring(node) and node.name not in inherited:
            yield f"{path}:{node.lineno}: {node.name}"


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _public(body: list[ast.stmt], known: Documented, inherited: set[str]) -> Iterator[tuple[Definition, set[str]]]:
    """Public definitions, each with the method names that its base classes document."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _public(node.body + node.orelse, known, inherited)
        elif isinstance(node, Definition) and not node.name.startswith("_"):
            if {ast.unparse(d).split(".")[-1] for d in node.decorator_list} & {"overload", "setter"}:
                continue
            yield node, inherited
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).split(".")[-1] for base in node.bases]
                yield from _public(node.body, known, set().union(*(known.get(base, ()) for base in bases)))


def place_faults(text: str, path: str) -> Iterator[str]:
    """Names of machine-specific folders and of package registries."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := PLACES.search(line.replace(TORCH_INDEX, "")):
            yield f"{path}:{number}: {found.group()}"


def python_files(*folders: str) -> Iterator[tuple[str, str]]:
    """(source, path relative to the root) of every Python file in these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()


def repository_files() -> Iterator[Path]:
    """Every tracked file, and every untracked one that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    yield from (ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def test_no_code_evaluates_or_unpickles_received_data():
    faults = [f for source, path in python_files("quire", "tools", "benchmarks") for f in unsafe_faults(source, path)]
    assert not faults, "\n".join(faults)


def test_no_module_pickles_messages_to_other_processes():
    files = [(source, path) for source, path in python_files("quire") if path != SIMULATING_PROCESSES]
    faults = [fault for source, path in files for fault in pickling_faults(source, path)]
    assert not faults, "\n".join(faults)


def test_no_environment_variable_changes_behaviour():
    faults = [fault for source, path in python_files("quire") for fault in environment_faults(source, path)]
    assert not faults, "\n".join(faults)


def test_all_public_definitions_have_docstrings():
    files = list(python_files("quire"))
    known: Documented = {}
    for source, _ in files:
        for name, methods in documented(source).items():
            known.setdefault(name, set()).update(methods)
    faults = [fault for source, path in files for fault in docstring_faults(source, path, known)]
    assert not faults, "no docstring:\n" + "\n".join(faults)


def test_files_are_short():
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "quire").rglob("*")
        if path.suffix in CODE
    }
    assert lengths
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}
    assert {path for path, lines in lengths.items() if lines > LONG} == set(REASONS)


def test_file_names_say_what_is_in_them():
    stems = {path.stem for path in (ROOT / "quire").rglob("*.py")}
    assert "scheduler" in stems
    assert not stems & VAGUE


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout: git cannot say which files belong to it")
def test_no_file_names_a_machine_or_a_registry():
    faults = []
    for path in repository_files():
        data = path.read_bytes()
        if b"\0" not in data:
            faults += place_faults(data.decode("utf-8"), path.relative_to(ROOT).as_posix())
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "torch.load('x')",
        "from torch import load",
        "read = torch.load",
        "eval('1')",
        "exec(code)",
        "list(map(eval, lines))",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=flag)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import unsafe_load",
        "compile(text, 'x', 'exec')",
        "import_module('pickle')",
        "importlib.import_module('marshal')",
        "__import__('shelve')",
        "os.system(line)",
    ],
)
def test_unsafe_faults_sees(source):
    assert len(list(unsafe_faults(source, "x.py"))) == 1


@pytest.mark.parametrize(
    "source",
    [
        *("model.eval()", "# eval(x), torch.load\n", "re.compile('x')", "run(shell=False)", "torch.loader(x)"),
        *("yaml.safe_load(x)", "import_module('json')"),
    ],
)
def test_unsafe_faults_lets_pass(source):
    assert list(unsafe_faults(source, "x.py")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import multiprocessing",
        "import multiprocessing.connection",
        "from multiprocessing import Pipe",
        "from multiprocessing.connection import Connection",
        "import torch.multiprocessing as mp",
        "torch.multiprocessing.spawn(f)",
        "from torch import multiprocessing",
        "from concurrent.futures import ProcessPoolExecutor",
        "futures.ProcessPoolExecutor()",
        "socket.recv_pyobj()",
        "dist.broadcast_object_list(values)",
    ],
)
def test_pickling_faults_sees(source):
    assert len({fault.split(": ")[0] for fault in pickling_faults(source, "x.py")}) == 1


def test_pickling_faults_lets_threads_and_bytes_pass():
    source = "from concurrent.futures import ThreadPoolExecutor\nsocket.sendall(b'')\ndist.broadcast(tensor)"
    assert list(pickling_faults(source, "x.py")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['CUDA_VISIBLE_DEVICES']",
        "import os\nos.environ.get('QUIRE_FAST')",
        "import os\nos.getenv(name)",
        "import os\nos.environ['QUIRE_LOG_LEVEL'] = 'debug'",
        "import os\nall = dict(os.environ)",
        "from os import environ",
        "typer.Option(envvar='X')",
    ],
)
def test_environment_faults_sees(source):
    assert len(list(environment_faults(source, "x.py"))) == 1


def test_environment_faults_allows_variables_of_openmp():
    assert list(environment_faults("import os\nos.environ.setdefault('GOMP_SPINCOUNT', '1')", "x.py")) == []
    assert len(list(environment_faults("import os\nos.environ.setdefault('QUIRE_LOG_LEVEL', '1')", "x.py"))) == 1


def test_environment_faults_lets_the_log_level_pass():
    assert list(environment_faults("import os\nos.environ.get('QUIRE_LOG_LEVEL', 'info')", "x.py")) == []
    assert list(environment_faults("import os\nos.getenv('QUIRE_LOG_LEVEL')", "x.py")) == []


def test_environment_faults_lets_the_command_line_read_the_key():
    assert list(environment_faults("Help('one key', envvar='QUIRE_API_KEY')", "x.py")) == []
    assert len(list(environment_faults("Help('one key', envvar='QUIRE_KEY')", "x.py"))) == 1


def test_docstring_faults_sees_every_kind():
    source = (
        "def f(): pass\nasync def g(): pass\nclass C:\n    def m(self): pass\n    def _p(self): pass\ndef _h(): pass"
    )
    assert [f.split(": ")[1] for f in docstring_faults(source, "x.py", {})] == ["module", "f", "g", "C", "m"]
    assert list(docstring_faults('"""M."""\ndef f():\n    """F."""\n    def inner(): pass', "x.py", {})) == []


def test_docstring_faults_lets_overriding_methods_rely_on_their_base():
    base = '"""M."""\nclass A:\n    """A."""\n    def m(self):\n        """M."""\n    def n(self): pass'
    derived = '"""M."""\nclass B(a.A):\n    """B."""\n    def m(self): pass\n    def n(self): pass'
    assert [f.split(": ")[1] for f in docstring_faults(derived, "x.py", documented(base))] == ["n"]


@pytest.mark.parametrize(
    "text", ["see /" + "root/x", "cd '/" + "work/main'", "--extra-index" + "-url", "https://pypi" + ".org"]
)
def test_place_faults_sees(text):
    assert len(list(place_faults("fine\n" + text, "x"))) == 1


def test_place_faults_lets_relative_folders_pass():
    assert list(place_faults("tree/" + "root/leaf, ~/" + "home/x, the framework/" + "home/page", "x")) == []

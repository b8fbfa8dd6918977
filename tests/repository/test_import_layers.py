"""A module of quire imports only what stands before it in ORDER, at its top; modules in TORCH_FREE never import torch.

The checkers at the top are pure functions from source text to errors. The last tests run them on small sources that
break a rule, so that a checker that finds nothing would fail.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Dotted names below quire. A module belongs to its longest matching entry, so that the modules of a folder are ordered,
# too.
ORDER = (
    # control plane
    *("preload", "errors", "control_characters", "core.kv_groups", "core.states", "config", "params", "core", "cost"),
    *("cache.retention", "cache.block_pool", "cache.block_table", "cache.prefix", "cache"),
    *(
        "speculation",
        "scheduler.adapters",
        "scheduler.sequence",
        "scheduler.step_builder",
        "scheduler.queue",
        "scheduler",
        "monitor",
    ),
    # execution
    *(
        "kernels.sampling_contract",
        "kernels.state_contract",
        "kernels.contract",
        "kernels.exact",
        "kernels.reference",
        "kernels.deterministic",
    ),
    *("kernels.cpu", "kernels.triton", "kernels"),
    *("weights.json_file", "weights.gguf.tensor_types", "weights.gguf.reader", "weights.gguf.special_tokens"),
    *("weights", "layers", "models", "models.transformers", "lora", "sampling", "kv_store", "runner"),
    # front end
    *("tenant_memory", "tenant_queue"),
    *("tokenizer", "chat", "hub", "structured_outputs.vocabulary", "structured_outputs.limits"),
    *("structured_outputs.forced_tokens", "structured_outputs.json_schema", "structured_outputs.fsm"),
    *(
        "structured_outputs",
        "structured_outputs.grammar_compilation",
        "engine",
        "startup",
        "llm",
        "supervisor",
        "fleet",
    ),
    *(
        "planner.files",
        "planner.lengths",
        "planner.modelled_runner",
        "planner.workloads",
        "planner.options",
        "planner",
        "cluster",
    ),
    *("lang.errors", "lang.params", "lang.batch", "lang.select", "lang.expressions", "lang.state_text"),
    *("lang.event_loop", "lang.backends", "lang", "terminal"),
    *(
        "server.options",
        "server.error_shapes",
        "server.middleware.quota",
        "server.api_keys",
        "server.observability.request_record",
        "server.errors",
    ),
    *("server.observability", "server.known_fields", "server.request_params", "server.middleware"),
    *("server.thread_pool", "server.model_names", "server.route_hints"),
    *("server.held_answer", "server.sse", "server.json_pieces"),
    *("server.store_database", "server.store", "server.multipart", "server.request_body"),
    *("server.adapters", "server.reply", "server.service"),
    *("server.batch.in_process_client", "server.batch.file_format", "server.batch.stored_files"),
    *("server.batch.sender", "server.batch.background", "server.viewers", "server.api.limits", "server.api"),
    *(
        "server",
        "server.batch",
        "quire",
        "flags",
        "cli",
        "command",
    ),  # quire/__init__.py re-exports names of the folders before it
)
CONTROL_PLANE = ORDER[: ORDER.index("monitor") + 1]
TORCH_FREE = {*CONTROL_PLANE, *(entry for entry in ORDER if entry.startswith("structured_outputs")), "tokenizer"}
TORCH_FREE |= {
    "chat",
    "weights.json_file",
    "weights.gguf.tensor_types",
    "weights.gguf.reader",
    "weights.gguf.special_tokens",
}  # for the tokenizer

# Imports that may be inside of a function: (file, function) -> reason.
LAZY = {
    ("quire/preload.py", "import_with_torch"): "what is imported, and in which order, is what it is for",
    ("quire/preload.py", "import_late"): "the same",
    (
        "quire/startup/model_loading.py",
        "_transformers_backend",
    ): "transformers is an optional extra, and slow to import",
    ("quire/kernels/choose.py", "_triton"): "triton is an optional package, and slow to import",
}


# Modules that `import_late` and `import_with_torch` import when they are first used -> reason.
LATE = {
    "quire.supervisor.engine_main": "torch and the modules without it are imported side by side",
    "quire.lang.backends.engine": "it needs torch, and programs for a server do not",
    "quire.cli": "the engine process starts before the command line is imported",
    "quire.hub.wheel": "filelock takes a tenth of a second, for downloads alone",
    "quire.hub.repository": "huggingface_hub takes a tenth of a second, for downloads alone",
    "quire.server.observability.tracing": "OpenTelemetry is an optional extra, and slow to import",
}


class Import(NamedTuple):
    """One imported name. `inside` is the function, class or TYPE_CHECKING block that contains it, or ""."""

    target: str  # dotted, absolute
    line: int
    inside: str


class _Collector(ast.NodeVisitor):
    """Collects every import of one module with its location."""

    def __init__(self, package: str) -> None:
        self.package = package  # base of relative imports
        self.inside: list[str] = []
        self.found: list[Import] = []

    def _note(self, target: str, node: ast.AST) -> None:
        self.found.append(Import(target, node.lineno, ".".join(self.inside)))

    def _enter(self, node: ast.AST, name: str) -> None:
        self.inside.append(name)
        self.generic_visit(node)
        self.inside.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._enter(node, node.name)

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_ClassDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            self._enter(node, "TYPE_CHECKING")
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._note(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1] if node.level else []
        origin = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            self._note(f"{origin}.{alias.name}", node)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        if function in ("import_late", "import_with_torch") and isinstance(node.args[0], ast.Constant):
            self.found.append(Import(node.args[0].value, node.lineno, "import_late()"))
        if function == "__import__" or function.split(".")[-1] == "import_module":
            name = node.args[0] if node.args else None
            constant = isinstance(name, ast.Constant) and isinstance(name.value, str)
            hidden = ".".join(self.inside) or "a call"
            self.found.append(Import(name.value if constant else "?", node.lineno, hidden))
        self.generic_visit(node)


def imports(source: str, path: str) -> list[Import]:
    """Every import in the source of `path` (relative to the root, with slashes)."""
    collector = _Collector(".".join(Path(path).parent.parts))
    collector.visit(ast.parse(source))
    return collector.found


def place(dotted: str) -> str:
    """The entry of ORDER that contains a dotted name, or "quire" for the package itself."""
    parts = dotted.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in ORDER:
            return ".".join(parts[:length])
    return "quire"


def place_of(path: str) -> str:
    """The entry of ORDER that contains the file at `path`, or the file's dotted name if there is none."""
    parts = Path(path).with_suffix("").parts
    if parts == ("quire", "__init__"):
        return "quire"
    dotted = ".".join(parts).removesuffix(".__init__")
    found = place(dotted)
    return dotted if found == "quire" else found


def layer_faults(source: str, path: str) -> Iterator[str]:
    """Imports of `path` that go upward."""
    home = place_of(path)
    if home not in ORDER:
        yield f"{path}: {home!r} has no place in the order; see docs/architecture.md"
        return
    for target, line, _ in imports(source, path):
        if target.split(".")[0] != "quire" or target == "quire.__version__":
            continue
        if ORDER.index(place(target)) > ORDER.index(home):
            yield f"{path}:{line}: {home} may not import {target}, which is not above it"


def hidden_faults(source: str, path: str) -> Iterator[str]:
    """Imports of `path` that are not at the top of the module."""
    for target, line, inside in imports(source, path):
        if inside == "import_late()":
            if target not in LATE:
                yield f"{path}:{line}: import of {target} is late"
        elif inside and (path, inside) not in LAZY:
            yield f"{path}:{line}: import of {target} is hidden in {inside}"


def torch_faults(source: str, path: str) -> Iterator[str]:
    """Imports of torch, or of modules that import it, in modules without torch."""
    if place_of(path) not in TORCH_FREE:
        return
    for target, line, _ in imports(source, path):
        if target.split(".")[0] in ("torch", "triton", "transformers", "safetensors"):
            yield f"{path}:{line}: {place_of(path)} may not import {target}"


def folder_arrows(source: str, path: str) -> Iterator[tuple[str, str]]:
    """(folder, folder it imports from) of `path`, each the first below what they have in common.

    A file beside the folder that it imports from, or that imports from it, belongs to no other folder.
    """
    home = Path(path).parent.parts
    for target, _, _ in imports(source, path):
        parts = tuple(target.split("."))
        length = next((n for n in range(len(parts), 0, -1) if (ROOT / Path(*parts[:n])).is_dir()), 0)
        folder = parts[:length]
        common = next((n for n, (a, b) in enumerate(zip(home, folder, strict=False)) if a != b), None)
        if length and common:
            yield "/".join(home[: common + 1]), "/".join(folder[: common + 1])


def circles(arrows: set[tuple[str, str]]) -> list[tuple[str, ...]]:
    """The groups of folders that import from each other, directly or through others."""
    reached = {start: {end for begin, end in arrows if begin == start} for start, _ in arrows}
    for _ in reached:
        for ends in reached.values():
            ends |= {further for end in ends for further in reached.get(end, ())}
    inside = [sorted(other for other in ends if start in reached.get(other, ())) for start, ends in reached.items()]
    return sorted({tuple(group) for group in inside if group})


def sources() -> Iterator[tuple[str, str]]:
    """(source, path relative to the root) of every module of quire."""
    for path in sorted((ROOT / "quire").rglob("*.py")):
        yield path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("rule", [layer_faults, hidden_faults, torch_faults])
def test_quire_keeps_the_rule(rule):
    faults = [fault for source, path in sources() for fault in rule(source, path)]
    assert not faults, "\n".join(faults)


def test_at_most_five_imports_are_hidden():
    assert len(LAZY) <= 5


def test_every_exception_is_still_needed():
    found = [(path, one) for source, path in sources() for one in imports(source, path) if one.inside]
    assert not set(LAZY) - {(path, one.inside) for path, one in found}
    assert set(LATE) == {one.target for _, one in found if one.inside == "import_late()"}


def test_no_folders_import_from_each_other():
    assert circles({arrow for source, path in sources() for arrow in folder_arrows(source, path)}) == []


def test_circles_are_found_through_other_folders_and_between_siblings():
    def of(**files):
        return circles({arrow for path, source in files.items() for arrow in folder_arrows(source, path)})

    down = {
        "quire/server/app.py": "from quire.cache import kv_cache",
        "quire/cache/kv_cache.py": "import quire.core.step",
    }
    assert of(**down) == []
    up = {"quire/core/step.py": "from quire.server import app"}
    assert of(**down, **up) == [("quire/cache", "quire/core", "quire/server")]
    siblings = {
        "quire/server/api/a.py": "from quire.server.middleware.b import x",
        "quire/server/middleware/b.py": "from quire.server.api.c import y",
        "quire/server/app.py": "from quire.server.api import a",
    }
    assert of(**siblings) == [("quire/server/api", "quire/server/middleware")]


def test_importing_the_whole_first_floor_does_not_import_torch():
    modules = [Path(path).with_suffix("").parts for _, path in sources()]
    names = [".".join(parts).removesuffix(".__init__") for parts in modules if place_of("/".join(parts)) in TORCH_FREE]
    assert "quire.scheduler" in names
    script = "import sys\nfor name in sys.argv[1:]: __import__(name)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("quire/cache/block_pool.py", "from quire.scheduler import scheduler"),
        ("quire/cache/block_pool.py", "from quire import scheduler"),
        ("quire/cache/block_pool.py", "import quire.scheduler.scheduler as s"),
        ("quire/cache/block_pool.py", "from ..scheduler import scheduler"),
        ("quire/cache/block_pool.py", "from .. import scheduler"),
        ("quire/cache/block_pool.py", "import quire"),
        ("quire/cache/block_pool.py", "from quire import LLM"),
        ("quire/cache/block_pool.py", "def f():\n    from quire.llm import LLM"),
        ("quire/errors.py", "from quire.params import SamplingParams"),
        ("quire/server/app.py", "from quire import LLM"),
        ("quire/__init__.py", "from quire import cli"),
        ("quire/utils/text.py", ""),
        ("quire/cache/prefix/index.py", "from quire.cache.kv_cache import KVCache"),
        ("quire/cache/block_pool.py", "from quire.cache.prefix.index import Index"),
    ],
)
def test_layer_faults_sees_an_upward_import(path, source):
    assert len(list(layer_faults(source, path))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "quire/scheduler/scheduler.py",
            "from quire.cache.block_pool import Pool\nfrom .queue import Queue\nfrom ..core import step",
        ),
        ("quire/cli.py", "import quire\nfrom quire.server import app\nfrom quire import LLM, errors"),
        ("quire/__init__.py", "from quire.llm import LLM"),
        ("quire/server/app.py", "from quire import __version__, engine"),
        ("quire/core/__init__.py", "from .step import Step\nfrom quire.errors import QuireError"),
        ("quire/runner/local.py", "import torch, quirelike.engine"),
    ],
)
def test_layer_faults_lets_downward_imports_pass(path, source):
    assert list(layer_faults(source, path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import_late('json')",
        "def f():\n    import json",
        "async def f():\n    from json import loads",
        "class C:\n    import json",
        "def f():\n    def g():\n        import json",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import json",
        "import typing as t\nif t.TYPE_CHECKING:\n    import json",
        "import importlib\nimportlib.import_module('json')",
        "from importlib import import_module\ndef f(name):\n    return import_module(name)",
        "json = __import__('json')",
        "class C:\n    def __getattr__(self, name):\n        import json",
    ],
)
def test_hidden_faults_sees_an_import_that_is_not_at_the_top(source):
    assert len(list(hidden_faults(source, "quire/__init__.py"))) == 1


def test_hidden_faults_lets_open_and_listed_imports_pass():
    optional = "try:\n    import triton\nexcept ImportError:\n    triton = None"
    assert list(hidden_faults(optional, "quire/kernels/triton.py")) == []
    lazy = "def _triton():\n    from quire.kernels.triton import kernels"
    assert list(hidden_faults(lazy, "quire/kernels/choose.py")) == []
    assert len(list(hidden_faults(lazy, "quire/cli.py"))) == 1


def test_torch_faults_sees_torch_on_the_first_floor_only():
    assert len(list(torch_faults("from torch.nn import Module", "quire/scheduler/scheduler.py"))) == 1
    assert len(list(torch_faults("def f():\n    import torch", "quire/params.py"))) == 1
    assert list(torch_faults("import torch", "quire/kernels/reference.py")) == []
    assert list(torch_faults("import torchlike, numpy", "quire/cache/block_pool.py")) == []

"""Result files state their measurement, and figures of the README rest on code that has not changed since theirs."""

import ast
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LINK = re.compile(r"benchmarks/results/(\w+\.json)")
FIGURE = re.compile(
    r"\d (?:times|%|s\b|of \d+ calls)|\dx\b|tokens/s|FLOP/s"
)  # what the README may only say with a result file
COMMIT = re.compile(r"[0-9a-f]{7,40}\b")


def faults(result: object) -> list[str]:
    """What a result file lacks."""
    if not isinstance(result, Mapping):
        return ["an object with commit, date, machine and command"]
    lacking = [name for name in ("date", "machine", "command") if not result.get(name)]
    commit = result.get("commit", result.get("measured_at_or_before"))
    return lacking if isinstance(commit, str) and COMMIT.match(commit) else ["commit", *lacking]


def blocks(page: str) -> list[str]:
    """Paragraphs, with the table that follows, and items of lists."""
    return re.split(r"\n\n(?!\|)|\n(?=- )", page)


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def meaning(name: str, source: str) -> str:
    """Of Python the syntax tree without comments, docstrings and the modules of imported names, of others the text."""
    if not name.endswith(".py"):
        return source
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    imported = sorted(ast.dump(one) for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names)
    tree.body = [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
    return f"{imported}\n{ast.dump(tree)}"


def changed(folder: Path, commit: str, paths: Sequence[str]) -> list[str]:
    """Files below `paths` that mean something else than at that commit."""
    found = []
    for name in git(folder, "diff", "--name-only", commit, "--", *paths).splitlines():
        try:
            before, now = git(folder, "show", f"{commit}:{name}"), (folder / name).read_text(encoding="utf-8")
        except (subprocess.CalledProcessError, FileNotFoundError):  # new, or removed
            found.append(name)
            continue
        if meaning(name, before) != meaning(name, now):
            found.append(name)
    return found


def test_result_files_state_commit_date_machine_and_command():
    lacking = {path.name: faults(json.loads(path.read_bytes())) for path in sorted(RESULTS.glob("*.json"))}
    assert lacking
    assert not {name: found for name, found in lacking.items() if found}


@pytest.mark.parametrize(
    ("result", "lacking"),
    [
        ([{"seconds": 1.0}], ["an object with commit, date, machine and command"]),
        ({"commit": "unknown", "date": "2026-01-01", "machine": "m"}, ["commit", "command"]),
        ({"measured_at_or_before": "1234567", "date": "2026-01-01", "machine": {}, "command": "c"}, ["machine"]),
        ({"commit": "1234567-dirty", "date": "2026-01-01", "machine": "m", "command": "c"}, []),
    ],
)
def test_what_a_result_file_lacks_is_named(result, lacking):
    assert faults(result) == lacking


def test_figures_of_the_readme_name_their_result_file():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert LINK.search(page)
    assert not [block for block in blocks(page) if FIGURE.search(block) and not LINK.search(block)]


@pytest.mark.parametrize("name", sorted(set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))))
def test_the_code_below_a_figure_of_the_readme_is_the_code_that_was_measured(name):
    result = json.loads((RESULTS / name).read_bytes())
    commit, code = result.get("commit", ""), result.get("code")
    assert code, f"{name} names no code that its figures rest on"
    assert all((ROOT / path).exists() for path in code), f"{name} names code that is not there"
    assert re.fullmatch(COMMIT, commit), f"{name} was not measured at a commit: {commit}"
    try:
        is_shallow = git(ROOT, "rev-parse", "--is-shallow-repository").strip() == "true"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("files without a repository")
    try:
        git(ROOT, "cat-file", "-e", f"{commit}^{{commit}}")
    except subprocess.CalledProcessError:
        if is_shallow:
            pytest.skip(f"a shallow clone, which has no commit {commit}")
        pytest.fail(f"{name}: there is no commit {commit}")
    stale = changed(ROOT, commit, code)
    assert not stale, (
        f"{name} is older than {', '.join(stale)}: measure again ({result['command']}), or remove its figures"
    )


def test_a_change_of_code_is_seen_and_one_of_comments_is_not(tmp_path):
    module, kernel = tmp_path / "code" / "a.py", tmp_path / "code" / "b.cpp"
    module.parent.mkdir()
    module.write_text('"""A."""\nX = 1  # one\n')
    kernel.write_text("int x;\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", *arguments)
    first = git(tmp_path, "rev-parse", "HEAD").strip()
    module.write_text('"""Another text."""\n\nX = 1\n')
    assert changed(tmp_path, first, ["code"]) == []
    module.write_text('"""A."""\nX = 2\n')
    kernel.unlink()
    assert changed(tmp_path, first, ["code"]) == ["code/a.py", "code/b.cpp"]
    assert changed(tmp_path, first, ["other"]) == []


def test_a_figure_without_a_result_file_would_be_seen():
    assert FIGURE.search("1.4 to 1.7 times as fast")
    assert FIGURE.search("91 % of prompt tokens")
    assert FIGURE.search("| prefill: tokens/s | 496 |")
    assert not FIGURE.search("takes 5.1 GB, and 23 architectures")
    assert blocks("a\nb\n\nc\n- d\n  e\n- f\n\n| g |") == ["a\nb", "c", "- d\n  e", "- f\n\n| g |"]

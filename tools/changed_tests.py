"""Run the tests that a change is most likely to break: `make test-changed`.

Tests mirror the package. For a changed module the nearest tests come first: those with its name in their file's name,
those that import it, its folder, the folders above it, those that import a module that imports it, and
tests/integration. They run until the CPU time that was recorded for them is spent. `make test` runs all.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIMES = Path("benchmarks") / "results" / "test_times.json"  # `make test ARGS="--test-times=FILE"`
SECONDS = 100.0  # CPU time of a selection
_UNKNOWN = 2.0  # seconds of a file without a record
_APART = ("tests/benchmarks/", "tests/real/")  # not in `make test` either
_REST = "tests/repository/"  # tests of documents, the Makefile and other files


class Selection(NamedTuple):
    """Files of tests, the nearest first, and those that are left to `make test`."""

    files: list[str]
    left: list[str]


def select(
    changed: Iterable[str],
    texts: Mapping[str, str],
    seconds: Mapping[str, float],
    most: float,
    sources: Mapping[str, str],
) -> Selection:
    """Choose tests for changed files.

    texts: the text of each file of tests, by path. seconds: CPU time of some of them. The nearest run in any case, and
    others for which there is room in `most` seconds. sources: the text of each module of quire, by path.
    """
    ranks: dict[str, int] = {}
    for path in changed:
        for rank, files in enumerate(_near(PurePosixPath(path), texts, sources)):
            for file in files:
                ranks[file] = min(rank, ranks.get(file, rank))
    files, left, spent = list[str](), list[str](), 0.0
    for file in sorted(ranks, key=lambda file: (ranks[file], seconds.get(file, _UNKNOWN), file)):
        needed = seconds.get(file, _UNKNOWN)
        if ranks[file] > 0 and spent + needed > most:
            left.append(file)
        else:
            files.append(file)
            spent += needed
    return Selection(files, left)


def selection(changed: Iterable[str], repository: Path = ROOT, most: float = SECONDS) -> Selection:
    """Choose tests for changed files of a repository, by the CPU seconds that it has recorded."""
    texts, sources = (
        {path.relative_to(repository).as_posix(): path.read_text() for path in (repository / folder).rglob(pattern)}
        for folder, pattern in (("tests", "test_*.py"), ("quire", "*.py"))
    )
    times = repository / TIMES
    recorded = json.loads(times.read_text())["files"] if times.exists() else {}
    return select(
        changed, texts, {file: each["cpu"] + each["children"] for file, each in recorded.items()}, most, sources
    )


def _near(changed: PurePosixPath, texts: Mapping[str, str], sources: Mapping[str, str]) -> Iterator[list[str]]:
    """Files of tests for a changed file, in ranks."""
    path = changed.as_posix()
    if path in texts:
        yield [path]
    elif changed.parts[:2] == ("tests", "rigs"):
        yield []
        yield _importing(changed.stem, texts)
    elif changed.parts[0] == "quire":
        usual = {file: text for file, text in texts.items() if not file.startswith(_APART)}
        folders = [PurePosixPath("tests", *folder.parts[1:]).as_posix() + "/" for folder in changed.parents[:-2]]
        folders = [folder for folder in folders if any(file.startswith(folder) for file in usual)]
        named = [file for file in usual if file.startswith(tuple(folders[:1])) and changed.stem in Path(file).stem]
        yield named if changed.stem != "__init__" else []
        yield _importing(_module(changed), usual)
        for folder in folders:
            yield [file for file in usual if file.startswith(folder)]
        importing = _importing(_module(changed), sources)
        yield [file for source in importing for file in _importing(_module(PurePosixPath(source)), usual)]
        yield [file for file in usual if file.startswith("tests/integration/")]
    else:
        yield []
        yield _importing(changed.with_suffix("").as_posix().replace("/", "."), texts)
        yield [file for file in texts if file.startswith(_REST)]


def _module(path: PurePosixPath) -> str:
    return ".".join((path.parent if path.stem == "__init__" else path.with_suffix("")).parts)


def _importing(module: str, texts: Mapping[str, str]) -> list[str]:
    """Files that name a module: a.b.c, or `from a.b import c`."""
    parent, _, name = module.rpartition(".")
    imported = rf"|from {re.escape(parent)} import [^\n]*\b{name}\b" if parent else ""
    pattern = re.compile(rf"\b{re.escape(module)}\b{imported}")
    return [file for file, text in texts.items() if pattern.search(text)]


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    """Print the selection and run it. Exits with pytest's code."""
    parser = argparse.ArgumentParser(prog="python -m tools.changed_tests", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", default="HEAD", help="compare with this commit")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU time")
    parser.add_argument("--list", action="store_true", help="print the files, run nothing")
    args, others = parser.parse_known_args()
    changed = [
        *_git("diff", "--name-only", "--diff-filter=d", args.base),
        *_git("ls-files", "-o", "--exclude-standard"),
    ]
    files, left = selection(changed, most=args.seconds)
    if not files:
        sys.exit(f"nothing that has tests differs from {args.base}")
    print("\n".join(files), file=sys.stderr)
    if left:
        print(f"{len(left)} more files are left to `make test`", file=sys.stderr)
    if not args.list:
        command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadfile", *files, *others]
        sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()

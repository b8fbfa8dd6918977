"""Retired words are in no identifier, file name or log message; docs/glossary.md has the present ones."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RETIRED = {
    *("anyhow", "beginnings", "caution", "filling", "forest", "garbage", "intake", "keeper", "ledger", "lives", "mind"),
    *("newcomers", "party", "scene", "sched", "surplus", "told", "untold", "vitals", "whim", "whims", "wish", "wishes"),
}
FOLDERS = ("quire", "tests", "tools", "benchmarks")
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}


def words(text: str) -> set[str]:
    """The words of an identifier or a message, in lower case: `isOpen_now` has "is", "open" and "now"."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)}


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of everything that a module names: definitions, parameters, variables, attributes, log messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LOG_METHODS
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def retired(source: str) -> list[str]:
    return [f"line {line}: {text}" for line, text in names(ast.parse(source)) if words(text) & RETIRED]


def test_no_retired_word_is_in_code_and_tests():
    faults = []
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        place = path.relative_to(ROOT).as_posix()
        faults += [f"{place}: {fault}" for fault in retired(path.read_text(encoding="utf-8"))]
        if words(place) & RETIRED:
            faults.append(place)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        "class RetentionWish: ...",
        "def keep(wish_of): ...",
        "def forest(): ...",
        "self.num_told = 3",
        "for lives in ():\n    pass",
        'log.warning("the ledger of %s is full", name)',
    ],
)
def test_retired_words_are_seen(source):
    assert len(retired(source)) == 1


@pytest.mark.parametrize("source", ["x = forestry", '"""A wish."""', 'text = "the mind"', "wishful = 1"])
def test_other_words_and_other_texts_are_not(source):
    assert retired(source) == []

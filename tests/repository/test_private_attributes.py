"""Tests look at behaviour through public names: they read few private attributes of other objects.

Use a public method, an inspection record (an explanation, statistics, tests/rigs/held_items.py) or a comparison.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MOST = 60
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_C"}  # of named tuples; the module of the CPU kernels
FOREIGN = {
    "_check_received_keys",
    "_experts_implementation",
    "_get_np_dtype",
    "_patch_lang",
    "_patch_attr",
}  # of libraries


def private_attributes(source: str) -> list[str]:
    """`line: expression` of each attribute with one leading underscore whose object is not self or the class."""
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC | FOREIGN
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]


def test_tests_read_few_private_attributes():
    found = [
        f"{path.relative_to(TESTS)}:{one}"
        for path in sorted(TESTS.rglob("*.py"))
        for one in private_attributes(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MOST, f"{len(found)} instead of at most {MOST}:\n" + "\n".join(found)


def test_private_attributes_are_counted():
    source = "a._b._c\nself._d\nmodule._E = 1\nrow._replace(x=1)\n__name__\nx.__dict__\nsuper()._f()"
    assert private_attributes(source) == ["1: a._b._c", "3: module._E", "1: a._b"]

"""Fields of a mutable record are assigned in the owner files that docs/architecture.md lists, and nowhere else."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(\w+)` \| `([\w/.]+)` \|(.*)\|$", re.MULTILINE)
# Receivers of another type whose field has the same name.
OTHER_TYPES = {
    ("engine/output_text.py", "self.result.cumulative_logprob"),
    ("engine/output_text.py", "result.cumulative_logprob"),
    ("llm.py", "transcript.metrics.explanation"),
    ("engine/output_text.py", "result.finish_reason"),
    ("planner/simulated_engine.py", "total.num_evicted_blocks"),
    ("planner/simulation.py", "total.requests"),
    ("planner/simulation.py", "total.seconds"),
    ("terminal/bench.py", "self._result.seconds"),
    ("planner/simulation.py", "result.ended"),
    ("planner/simulation.py", "result.num_cached"),
    ("planner/simulation.py", "opened.result.replica"),
}


@cache
def parsed(path):
    return ast.parse((ROOT / "quire" / path).read_text())


def fields(node):
    """The fields that a class sets on itself, declares, or has as slots."""
    found = set()
    for one in ast.walk(node):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            found.add(one.target.id)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self":
            found.add(one.attr)
    return found


@cache
def classes(path):
    return {node.name: fields(node) for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)}


@cache
def table():
    """record -> (its fields, {file: fields that it may assign})."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    text = text[text.index("## Mutable records and their owners") : text.index("## Invariants")]
    records = {}
    for name, home, others in ROW.findall(text):
        own = classes(home)[name]
        owners = {home: own}
        for part in filter(str.strip, others.split(";")):
            files, names = part.rsplit(":", 1)
            allowed = own if names.strip() == "all" else set(re.findall(r"`(\w+)`", names))
            assert allowed <= own, f"{name} has no field {allowed - own}"
            owners |= dict.fromkeys(re.findall(r"`([\w/.]+)`", files), allowed)
        records[name] = own, owners
    return records


def assignments(path):
    """(line, receiver with field, field) of each assignment to a field of another object than self."""
    return [
        (node.lineno, ast.unparse(node), node.attr)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and ast.unparse(node.value) not in ("self", "cls")
    ]


def strangers(path, records):
    """Assignments in a file to fields of records that it does not own."""
    local = set().union(*classes(path).values())
    return [
        f"quire/{path}:{line}: {text} belongs to {name}"
        for line, text, field in assignments(path)
        for name, (own, owners) in records.items()
        if field in own
        and field not in owners.get(path, ())
        and field not in local
        and (path, text) not in OTHER_TYPES
        # fields of this name in several records: the file owns one of them
        and not any(field in allowed.get(path, ()) for _, allowed in records.values())
    ]


def test_fields_of_records_are_assigned_by_their_owners():
    files = sorted(str(path.relative_to(ROOT / "quire")) for path in ROOT.glob("quire/**/*.py"))
    assert [found for path in files for found in strangers(path, table())] == []


def test_the_table_has_the_records_of_scheduler_and_cache():
    records = table()
    assert len(records) >= 18
    assert {"num_pending", "epoch", "row", "swapped"} <= records["Sequence"][0]
    assert "num_indexed" in records["IndexCursor"][0]


def test_an_assignment_elsewhere_is_found(monkeypatch):
    text = "def steal(seq, table):\n    seq.epoch += 1\n    table.cursor.num_indexed = 3\n    del seq.table\n"
    monkeypatch.setattr(f"{__name__}.parsed", lambda path: ast.parse(text) if path == "x.py" else _parsed(path))
    found = strangers("x.py", table())
    assert [line.split(" belongs to ")[1] for line in found] == ["Sequence", "IndexCursor", "Sequence"]


_parsed = parsed

"""The benchmark of public schema suites on small folders of their layouts."""

import json

import pytest

from benchmarks.structured import corpora

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"format": "iri"}}, "required": ["a"]}
INSTANCES = [({"a": 1}, True), ({"b": "x", "a": 1}, True), ({"a": "x"}, False)]


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_each_suite_is_known_by_its_layout_and_counted(tmp_path):
    tests = [{"description": f"{i}", "data": data, "valid": valid} for i, (data, valid) in enumerate(INSTANCES)]
    refused = {"description": "refused", "schema": {"not": {"pattern": "a"}}, "tests": tests}
    group = {"description": "group", "schema": SCHEMA, "tests": tests}
    write(tmp_path / "suite" / "tests" / "draft2020-12" / "a.json", [group, refused])
    write(tmp_path / "bench" / "maskbench" / "data" / "x.json", {"schema": SCHEMA, "tests": tests})
    write(tmp_path / "store" / "src" / "schemas" / "json" / "y.json", SCHEMA)
    write(tmp_path / "store" / "src" / "test" / "y" / "good.json", INSTANCES[0][0])
    write(tmp_path / "store" / "src" / "negative_test" / "y" / "bad.json", INSTANCES[2][0])
    folders = [tmp_path / name for name in ("suite", "bench", "store")]
    found = corpora.measure(folders, "llguidance", limit=None, processes=1)
    assert list(found) == ["JSON-Schema-Test-Suite", "jsonschemabench", "SchemaStore"]
    suite = found["JSON-Schema-Test-Suite"]
    assert (suite["schemas"], suite["accepted"], list(suite["refused"])) == (2, 1, ["draft2020-12/a.json: refused"])
    assert suite["valid_rejected_by_reason"] == {"order of properties": 1}
    assert [one["invalid_accepted"] for one in found.values()] == [[], [], []]
    assert found["SchemaStore"]["invalid_instances"] == 1
    assert "jsonschemabench" in "\n".join(corpora.tables(found))


def test_another_folder_is_no_suite(tmp_path):
    with pytest.raises(ValueError, match="the layout of no known suite"):
        corpora.measure([tmp_path], "llguidance", limit=1, processes=1)

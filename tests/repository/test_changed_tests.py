"""`make test-changed`: which tests are chosen for a change."""

import pytest

from tools.changed_tests import select

TEXTS = {
    "tests/cache/prefix/test_radix_tree.py": "from quire.cache.prefix.radix_tree import RadixTree",
    "tests/cache/prefix/test_radix_tree_stateful.py": "",
    "tests/cache/prefix/test_eviction.py": "from quire.cache.prefix import eviction, radix_tree",
    "tests/cache/test_kv_cache.py": "from radix_rig import tree",
    "tests/scheduler/test_admission.py": "import quire.cache.prefix.radix_tree",
    "tests/engine/test_generate.py": "from quire.engine.engine import Engine",
    "tests/scheduler/test_journal.py": "from tools.draw_journal import draw",
    "tests/integration/test_cli.py": "",
    "tests/benchmarks/test_eviction.py": "from quire.cache.prefix.radix_tree import RadixTree",
    "tests/repository/test_docs.py": "",
}
SOURCES = {"quire/engine/engine.py": "from quire.cache.prefix.radix_tree import RadixTree", "quire/errors.py": ""}
PREFIX = ("cache/prefix/test_radix_tree", "cache/prefix/test_radix_tree_stateful")
CLI, KV_CACHE = "integration/test_cli", "cache/test_kv_cache"
TREE = "quire/cache/prefix/radix_tree.py"


@pytest.mark.parametrize(
    ("changed", "files"),
    [
        (
            TREE,
            [*PREFIX, "cache/prefix/test_eviction", "scheduler/test_admission", KV_CACHE, "engine/test_generate", CLI],
        ),
        (
            "quire/cache/prefix/__init__.py",
            [
                "cache/prefix/test_eviction",
                PREFIX[0],
                "scheduler/test_admission",
                PREFIX[1],
                KV_CACHE,
                "engine/test_generate",
                CLI,
            ],
        ),
        ("tests/rigs/radix_rig.py", [KV_CACHE]),
        ("tests/benchmarks/test_eviction.py", ["benchmarks/test_eviction"]),
        ("tools/draw_journal.py", ["scheduler/test_journal", "repository/test_docs"]),
        ("README.md", ["repository/test_docs"]),
    ],
)
def test_the_nearest_tests_come_first(changed, files):
    assert select([changed], TEXTS, {}, 1e9, SOURCES) == ([f"tests/{file}.py" for file in files], [])


def test_tests_of_the_module_s_name_run_in_any_case_and_others_while_there_is_time():
    seconds = dict.fromkeys(TEXTS, 10.0)
    files, left = select([TREE], TEXTS, seconds, 5.0, SOURCES)
    assert files == ["tests/cache/prefix/test_radix_tree.py", "tests/cache/prefix/test_radix_tree_stateful.py"]
    assert len(left) == 5
    seconds["tests/cache/prefix/test_eviction.py"] = 100.0
    files, left = select([TREE], TEXTS, seconds, 45.0, SOURCES)
    assert len(files) == 4 and "tests/scheduler/test_admission.py" in files
    assert "tests/cache/prefix/test_eviction.py" in left

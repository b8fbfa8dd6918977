"""The command that counts other servers' test cases: what it runs, how it counts, and SGLang's cases."""

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO, StringIO

import pytest
from embedded_model_server import run_app, service_of
from rich.console import Console

from benchmarks.server_cases import sglang_checks, vllm_suite
from benchmarks.server_cases.results import ABOUT, UNEXPLAINED, Case, SuiteError, about, report, table_of
from benchmarks.server_cases.vllm_options import translated
from quire.config import EngineOptions
from quire.server.app import make_app
from quire.startup.build import build

TESTS = """
import pytest
from tests.utils import RemoteOpenAIServer

MODEL_NAME = "some/model-7B"

@pytest.fixture
def server():
    yield RemoteOpenAIServer(MODEL_NAME, [])

def test_unit():
    raise AssertionError("is not run")

@pytest.mark.parametrize("length", [8192, 5])
def test_with_fixture(server, length):
    assert length == 2048, "the length"

def test_in_body():
    assert RemoteOpenAIServer(MODEL_NAME, []) is not None
"""
FILE = "openai/test_some.py"
PLAN = vllm_suite.Plan([FILE], [{"file": FILE, "text": "8192", "by": "2048"}], [])


@pytest.fixture
def sdist(tmp_path):
    path = tmp_path / "vllm.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in ((f"tests/entrypoints/{FILE}", TESTS), ("tests/entrypoints/__init__.py", ""), ("x.py", "")):
            member = tarfile.TarInfo(f"vllm-1/{name}")
            member.size = len(text)
            archive.addfile(member, BytesIO(text.encode()))
    return path


def test_cases_that_start_a_server_are_run_and_recorded(sdist, tmp_path):
    folder = tmp_path / "folder"
    tests = folder / "tests"
    assert vllm_suite.unpack(sdist, tests, PLAN) == {"some/model-7B"}
    vllm_suite.cache_models(["some/model-7B"], folder / "models")
    assert (folder / "models/models--some--model-7B/snapshots/embedded/config.json").is_file()
    (tests / "utils.py").write_text("class RemoteOpenAIServer:\n    def __init__(self, *_): pass\n")
    results = folder / "results.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/entrypoints/{FILE}"]
    environment = {**os.environ, "QUIRE_RESULTS": str(results)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    cases = list(vllm_suite.recorded_cases(results))
    assert [(case.file, case.name, case.passed) for case in cases] == [
        (FILE, "test_with_fixture[2048]", True),
        (FILE, "test_with_fixture[5]", False),
        (FILE, "test_in_body", True),
    ]
    assert "the length" in cases[1].message


def test_a_text_to_adapt_must_be_there(sdist, tmp_path):
    plan = PLAN._replace(adapted=[{"file": FILE, "text": "4096", "by": "2048"}])
    with pytest.raises(SuiteError, match=f"{FILE} does not have the text '4096'"):
        vllm_suite.unpack(sdist, tmp_path / "tests", plan)


def test_options_of_vllm():
    given = [
        "--dtype",
        "half",
        "--max-model-len=8192",
        "--enable-lora",
        "--lora-modules",
        "a=/x",
        "b=/y",
        "--port",
        "1",
    ]
    given += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-num-seqs", "4"]
    assert translated("some/model", given) == (
        [
            *("--max-model-len", "2048", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--max-num-seqs", "4", "--max-logprobs", "20", "--served-model-name", "some/model"),
            *("--served-model-name", "a", "--served-model-name", "b"),
        ],
        ["--dtype", "--enable-lora"],
    )
    given = ["--served-model-name", "n", "--max-logprobs", "9999"]
    assert translated("m", given) == (["--max-logprobs", "128", "--served-model-name", "n"], [])


def test_failed_cases_are_listed_by_class_and_reason():
    cases = [
        Case("a.py", "test_one[x]", passed=False, message="AssertionError: a\nb"),
        Case("a.py", "test_one[y]", passed=False),
        Case("b.py", "test_two", passed=True),
        Case("b.py", "test_three", passed=False, message="ValueError: no\nmore"),
    ]
    found = report(cases, {"test_one": ["model", "words"], "a.py::test_one[y]": ["choice", "on purpose"]})
    assert (found["passed"], found["cases"], found["files"]["a.py"]) == (1, 4, {"passed": 0, "cases": 2})
    assert found["failed_by_class"] == {"model": 1, "choice": 1, UNEXPLAINED: 1}
    assert [one["reason"] for one in found["failed"]] == ["words", "on purpose", "ValueError: no"]
    console = Console(width=200, file=StringIO())
    console.print(table_of("suite", found))
    assert "suite: 1 of 4" in console.file.getvalue()


def test_reasons_have_known_classes():
    classes = about("classes").keys()
    for suite in ("vllm", "sglang"):
        assert all(kind in classes and text for kind, text in about(suite)["reasons"].values())


@pytest.fixture(scope="module")
def url():
    options = EngineOptions(max_num_seqs=16, memory="512MiB")
    with run_app(make_app(service_of(build(options, report=lambda _: None, progress=lambda _, __: None)))) as url:
        yield url


def test_checks_of_sglang_fail_for_known_reasons_only(url):
    found = report(sglang_checks.run(url), about("sglang")["reasons"])
    assert found["cases"] == 37
    assert not [one for one in found["failed"] if one["class"] == UNEXPLAINED]
    recorded = json.loads((ABOUT.parents[1] / "results" / "server_cases.json").read_text())["sglang"]
    assert found["passed"] == recorded["passed"]

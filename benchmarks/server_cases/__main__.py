"""The server tests of vLLM and SGLang against `quire serve` with the embedded model.

    python -m benchmarks.server_cases [--vllm-python PYTHON --sdist FILE] [--json FILE]

vLLM's cases are its own: --sdist names its source distribution, --vllm-python an interpreter that has vLLM of the same
version, pytest, pytest-asyncio and the packages openai and anthropic. Only names are adapted, and the length that
cases.toml lists. Cases with numbers that are too large for the embedded model are run again with smaller ones, and
counted apart. SGLang's cases are written anew in sglang_checks.py. Each case that fails is listed with its reason from
cases.toml. The exit status is 1 if a case fails for no known reason.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.clients.__main__ import server
from benchmarks.result_file import write_result
from benchmarks.server_cases import sglang_checks, vllm_suite
from benchmarks.server_cases.results import UNEXPLAINED, SuiteError, about, report, table_of
from quire.startup.hardware import cpu_description

_PLAIN: Mapping[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def vllm(python: str, sdist: Path) -> dict[str, Any]:
    """The report of vLLM's cases. Raises SuiteError."""
    table = about("vllm")
    results = []
    for plan in vllm_suite.plans(table):
        with tempfile.TemporaryDirectory() as folder:
            results.append(vllm_suite.run(python, sdist, plan, Path(folder)))
    (cases, left_out), (scaled, _) = results
    failed = {(case.file, case.name) for case in cases if not case.passed}
    also = [f"{case.file}::{case.name}" for case in scaled if case.passed and (case.file, case.name) in failed]
    return {
        "version": table["version"],
        **report(cases, table["reasons"]),
        "passed_with_smaller_numbers": also,
        "options_left_out": left_out,
    }


def main() -> None:
    """Run the suites, print the tables and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", metavar="PYTHON", help="an interpreter that has vLLM and pytest")
    parser.add_argument("--sdist", type=Path, help="vLLM's source distribution, a .tar.gz file")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    if (args.vllm_python is None) != (args.sdist is None):
        parser.error("--vllm-python and --sdist belong together")
    console, suites = Console(), {}
    try:
        if args.sdist is not None:
            suites["vllm"] = vllm(args.vllm_python, args.sdist)
        with server() as url:
            suites["sglang"] = report(sglang_checks.run(url), about("sglang")["reasons"])
    except SuiteError as error:
        sys.exit(str(error))
    for name, found in suites.items():
        console.print(table_of(name, found))
        for case in found.get("passed_with_smaller_numbers", ()):
            console.print(f"passes with smaller numbers: {case}", **_PLAIN)
        for one in found["failed"]:
            console.print(f"{one['class']:12} {one['case']}: {one['reason']}", **_PLAIN)
    if args.json is not None:
        machine = {"cpu": cpu_description(), "python": sys.version.split()[0]}
        write_result(args.json, {"machine": machine, **suites})
    sys.exit(any(UNEXPLAINED in found["failed_by_class"] for found in suites.values()))


if __name__ == "__main__":
    main()

"""A pytest plugin: the time that each case, file and fixture takes, and an upper bound for it.

Times are CPU seconds of the process that runs the test. Those of the programs that a test starts count for its file,
once the test has waited for their end. `--test-times=FILE` writes all figures. With `--test-budgets` a run fails if a
case or a file takes too long, as in CI. Machines differ, and CPU seconds double if two threads of a core compute: a
bound is that of the machine of the recorded run, times the upper quartile of what files take here in the seconds of
that run. A case that cannot be faster is marked `cpu_seconds(NUMBER, reason=...)`: it may take so many with its
programs, and does not count for its file. With `--long-files-first` the longest files of the recorded run come first,
so that all processes end together.
"""

import json
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

CASE_SECONDS = 8.0
FILE_SECONDS = 30.0
LEAST_FILES = 20  # of the recorded run, from which on their times say how slow a machine is
RECORDED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "test_times.json"
_PHASES = ("setup", "call", "teardown")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--test-times", type=Path, metavar="FILE", help="write the seconds of each file and fixture")
    parser.addoption("--long-files-first", action="store_true", help="run files in the order of their recorded seconds")
    parser.addoption("--test-budgets", action="store_true", help="fail if a case or a file takes too many CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_seconds(number, reason): what a case may take that cannot be faster")
    config.pluginmanager.register(_Meter(), "case_times_meter")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Table(config), "case_times_table")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long-files-first"):
        recorded = _recorded()
        seconds = {file: sum(each.get(phase, 0) for phase in _PHASES) for file, each in recorded.items()}
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))  # a stable order


def _recorded() -> dict[str, dict[str, float]]:
    """The figures of each file in the recorded run."""
    files: dict[str, dict[str, float]] = json.loads(RECORDED.read_text())["files"]
    return files


def slowness(files: Mapping[str, Mapping[str, float]], recorded: Mapping[str, Mapping[str, float]]) -> float:
    """How many times the recorded CPU seconds files take here: the upper quartile of those of a second and more.

    1 for a faster machine, and if fewer than LEAST_FILES are known.
    """
    known = [(_cpu_seconds(one), _cpu_seconds(recorded[name])) for name, one in files.items() if name in recorded]
    ratios = [here / there for here, there in known if there >= 1]
    return max(1.0, statistics.quantiles(ratios, n=4)[2]) if len(ratios) >= LEAST_FILES else 1.0


def _cpu_seconds(file: Mapping[str, float]) -> float:
    """CPU seconds of a file with the programs that it starts."""
    return file["cpu"] + file["children"]


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _header() -> dict[str, str]:
    """As of all result files. This rig is also used where `benchmarks` cannot be imported."""
    from quire.startup.hardware import cpu_description  # noqa: PLC0415  (most runs write no file)

    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        commit = done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{cpu_description()}, Python {platform.python_version()}",
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


class _Meter:
    """Adds figures to the reports of a process that runs tests."""

    def __init__(self) -> None:
        self._fixtures: dict[str, float] = {}
        self._started = 0
        self._marks = (0.0, 0.0, 0)
        sys.addaudithook(self._count_processes)

    def _count_processes(self, event: str, _arguments: object) -> None:
        self._started += event in ("subprocess.Popen", "os.fork", "os.posix_spawn")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            self._fixtures[fixturedef.argname] = time.perf_counter() - began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self._begin()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        self._begin()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        self._begin()
        return (yield)

    def _begin(self) -> None:
        self._fixtures = {}
        self._marks = (time.process_time(), _children_seconds(), self._started)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        allowance = item.get_closest_marker("cpu_seconds")
        report.allowed_seconds = None if allowance is None else allowance.args[0]
        cpu, children, started = self._marks
        report.cpu_seconds = time.process_time() - cpu
        report.children_seconds = _children_seconds() - children
        report.num_processes = self._started - started
        report.fixture_seconds = self._fixtures
        return report


class _Table:
    """Sums of the reports, in the process that has those of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._file: Path | None = config.getoption("--test-times")
        self._fails: bool = config.getoption("--test-budgets")
        self._began = time.time()
        self._cases: dict[str, float] = defaultdict(float)
        self._allowed: dict[str, float] = {}  # of marked cases
        self._files: dict[str, Counter[str]] = defaultdict(Counter)
        self._fixtures: dict[str, Counter[str]] = defaultdict(Counter)
        self._workers: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: Any) -> None:
        case, file = report.nodeid, report.nodeid.partition("::")[0]
        self._cases[case] += report.cpu_seconds
        if report.allowed_seconds is not None:
            self._allowed[case] = report.allowed_seconds
            self._cases[case] += report.children_seconds
        self._files[file].update(
            {
                report.when: report.duration,
                "cpu": report.cpu_seconds,
                "children": report.children_seconds,
                "processes": report.num_processes,
                "cases": report.when == "call",
            }
        )
        for name, seconds in report.fixture_seconds.items():
            self._fixtures[name].update({"seconds": seconds, "times": 1})
        worker = self._workers[getattr(report, "worker_id", "main")]
        worker.update({"seconds": report.duration, "cpu": report.cpu_seconds})
        worker["end"] = max(worker["end"], report.stop - self._began)

    def _over(self) -> list[tuple[float, str, float]]:
        """Seconds, name and bound of each case and file that takes too long."""
        times = slowness(self._files, _recorded())
        cases = [
            (seconds, name, times * self._allowed.get(name, CASE_SECONDS)) for name, seconds in self._cases.items()
        ]
        of_files = {name: _cpu_seconds(each) for name, each in self._files.items()}
        for name in self._allowed:
            of_files[name.partition("::")[0]] -= self._cases[name]
        files = [(seconds, name, times * FILE_SECONDS) for name, seconds in of_files.items()]
        return [(seconds, name, most) for seconds, name, most in sorted(cases + files, reverse=True) if seconds > most]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._fails and self._over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._file is not None:
            by_seconds = sorted(self._files.items(), key=lambda item: -sum(item[1][phase] for phase in _PHASES))
            found = {
                **_header(),
                "seconds": time.time() - self._began,
                "workers": self._workers,
                "files": {name: {key: round(value, 2) for key, value in each.items()} for name, each in by_seconds},
                "fixtures": dict(sorted(self._fixtures.items(), key=lambda item: -item[1]["seconds"])[:60]),
                "cases": dict(sorted(self._cases.items(), key=lambda item: -item[1])[:60]),
            }
            self._file.write_text(json.dumps(found, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for seconds, name, most in self._over():
            terminalreporter.write_line(f"{name}: {seconds:.1f} CPU seconds, at most {most:.0f}")

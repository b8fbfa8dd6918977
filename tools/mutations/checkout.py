"""A copy of a repository's last commit in which one fault at a time is written, and tests run."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tools.mutations.faults import Fault

RECORDER = Path(__file__).with_name("recorder.py")
MAX_FAILED = 3  # tests of a file, after which a run ends
TEST_SECONDS = 180  # of a test, after which it fails
RUN_SECONDS = 1800  # of a run, after which it is killed, and the test that runs has failed
_EXTENSION = Path("quire") / "kernels" / "cpu"
_BUILT = "_C*.so"
_USUAL = (0, 1, 2, 5)  # exit codes of pytest: passed, failed, stopped at the most failures, no tests
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_SHOWN = 2000  # characters of an output that an error quotes


def sources_of(repository: Path, commit: str) -> str:
    """A hash of the folders quire and tests at a commit."""
    command = ["git", "rev-parse", *(f"{commit}:{folder}" for folder in ("quire", "tests"))]
    trees = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout
    return hashlib.sha256(trees.encode()).hexdigest()[:16]


class Run(NamedTuple):
    """A run of tests. ran, failed: node ids. is_late: whether it was killed, while the last of both ran."""

    ran: list[str]
    failed: list[str]
    is_late: bool


class Checkout:
    """The copy in `folder`, of `commit`. Its compiled extension is that of the repository."""

    def __init__(self, repository: Path, folder: Path, commit: str) -> None:
        self.folder = folder
        self._extension = sorted((repository / _EXTENSION).glob(_BUILT))
        self._notes = folder.with_suffix(".run")  # beside the copy, in which tests may look at all files
        self._notes.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        if not (folder / ".git").exists():
            self._call(
                "git", "clone", "--quiet", "--shared", "--no-checkout", str(repository), str(folder), cwd=repository
            )
        self._call("git", "checkout", "--quiet", "--force", "--detach", commit)
        self._copy_extension()
        # Python compares hashes of sources: times and sizes of a right source and of a faulty one can be equal.
        self._call(sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "quire")

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Has the fault inside. Raises ValueError as `Fault.patched`, and RuntimeError if it does not compile."""
        file = self.folder / fault.file
        right = file.read_text(encoding="utf-8")
        file.write_text(fault.patched(right), encoding="utf-8")
        try:
            if fault.is_compiled:
                self._build()
            yield
        finally:
            file.write_text(right, encoding="utf-8")
            if fault.is_compiled:
                self._copy_extension()

    def run(self, tests: Iterable[str], *, words: Iterable[str] = (), without: Iterable[str] = ()) -> Run:
        """Run tests until MAX_FAILED of a file have failed, or to the end of a file with fewer.

        words: tests in files whose names have most of them run first. without: node ids that do not run.

        Raises RuntimeError if pytest cannot run, and after `stop`.
        """
        if self._is_stopped:
            raise RuntimeError("the run was stopped")
        there = [test for test in tests if (self.folder / test.partition("::")[0]).exists()]
        if not there:
            return Run([], [], is_late=False)
        record, left_out = self._notes / "record.jsonl", self._notes / "without.txt"
        left_out.write_text("\n".join(without), encoding="utf-8")
        command = [sys.executable, "-P", str(RECORDER), str(record), str(left_out), "_".join(words), *there]
        command += [f"--maxfail={MAX_FAILED}", f"--timeout={TEST_SECONDS}", "--tb=no", "-p", "no:cacheprovider"]
        output = self._notes / "output.txt"
        code = self._exit_code(command, output)
        events = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        ran, failed = ([event[kind] for event in events if kind in event] for kind in ("began", "failed"))
        if code is None or code < 0:
            failed += ran[-1:]
        elif code not in _USUAL or (code == 1 and not failed):
            raise RuntimeError(f"pytest ended with {code}: {output.read_text(errors='replace')[-_SHOWN:]}")
        return Run(ran, list(dict.fromkeys(failed)), code is None)

    def stop(self) -> None:
        """Kill the run that is in progress, and let no other one begin. Can be called from another thread."""
        self._is_stopped = True
        if self._process is not None and self._process.poll() is None:
            _kill(self._process)

    def _exit_code(self, command: list[str], output: Path) -> int | None:
        """The exit code of a command, None after RUN_SECONDS. No process that it has started in its session is left."""
        with output.open("w") as file:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            return self._process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(self._process)
            self._process.wait()

    @property
    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.folder), str(self.folder / "tests" / "rigs")))
        return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    def _copy_extension(self) -> None:
        for file in self._extension:
            shutil.copyfile(file, self.folder / _EXTENSION / file.name)

    def _build(self) -> None:
        """Build the extension for the instruction set that this processor gets."""
        script = "from quire.kernels.cpu import _C; print(_C.builds()[0])"
        builds = {"QUIRE_BUILDS": self._call(sys.executable, "-c", script).strip()}
        self._call(sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force", more=builds)

    def _call(self, *command: str, cwd: Path | None = None, more: Mapping[str, str] = _NO_VARIABLES) -> str:
        """The output of a command. more: variables of its environment. Raises RuntimeError if the command fails."""
        environment = {**self._environment, **more}
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {(done.stdout + done.stderr)[-_SHOWN:]}")
        return done.stdout


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process with those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

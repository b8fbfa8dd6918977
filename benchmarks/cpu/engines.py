"""An engine in a process of its own, driven by a script that speaks drivers/protocol.py. Imports no engine."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.workloads import SMALLEST_VOCABULARY, Query, Workload, workload

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = Path(__file__).parent / "drivers"
PEERS = ("vllm", "transformers", "openvino", "llama_cpp")
# those that read GGUF, and the type of matrices: OpenVINO reads no BF16 there
_GGUF = {"openvino": "F16", "llama_cpp": "BF16"}
_PATIENCE = 60.0  # seconds that an engine has to end by itself


class EngineError(Exception):
    """An engine did not do what it was asked."""


@dataclass(frozen=True)
class Engine:
    """What to start: the name of a driver, the interpreter that has the engine, and what the driver is told."""

    name: str
    python: str
    model: Path
    max_num_seqs: int = 32
    max_model_len: int = 4096
    driver: Path | None = None  # another script than the one of that name
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine itself, in place of a driver's own choice

    @property
    def script(self) -> Path:
        """The driver's."""
        return self.driver or DRIVERS / f"{self.name}_driver.py"


@dataclass(frozen=True)
class Answer:
    """How long a workload took. ttft: seconds to the first token of the first query, where it is known."""

    seconds: float
    ttft: float | None
    ttft_is: str


@dataclass
class Running:
    """An engine that is loaded and warm. `facts`: what it says about itself, and how it was started."""

    engine: Engine
    process: subprocess.Popen[str]
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def run(self, work: Workload) -> Answer:
        """Answer all queries at once. Raises EngineError, also for an output that has not the length asked for."""
        answer = self._ask({"name": work.name, "queries": _plain(work.queries)}, ("seconds", "ttft", "num_tokens"))
        wanted = [query.num_output_tokens for query in work.queries]
        if answer["num_tokens"] != wanted:
            raise self._error(f"{work.name}: outputs have {answer['num_tokens']} tokens, asked for were {wanted}")
        return Answer(answer["seconds"], answer["ttft"], answer.get("ttft_is", "of the run"))

    def answer(self, queries: Sequence[Mapping[str, Any]]) -> tuple[float, list[int]]:
        """Seconds and tokens of queries as drivers take them, whose outputs have the length that they have."""
        found = self._ask({"name": "forms", "queries": list(queries)}, ("seconds", "num_tokens"))
        return found["seconds"], found["num_tokens"]

    def memory(self) -> dict[str, Any]:
        """Resident bytes of all its processes, and whether that is PSS or RSS."""
        return self._ask({"memory": True}, ("bytes", "kind"))

    def stop(self) -> None:
        """Let it end by itself, and end what is left of it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self.process.stdin.close()
                self.process.wait(_PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process.stdout.close()
            self.log.unlink(missing_ok=True)

    def _ask(self, question: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self._error("ended before it was asked") from None
        line = self.process.stdout.readline()
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_PATIENCE)
            raise self._error(f"ended without an answer, with status {self.process.returncode}")
        try:
            answer: dict[str, Any] = json.loads(line)
            missing = [key for key in keys if key not in answer]
        except (ValueError, TypeError):
            raise self._error(f"answered {line.strip()!r}, which is no JSON object") from None
        if missing:
            raise self._error(f"answered {line.strip()!r}, which lacks {', '.join(missing)}")
        return answer

    def _error(self, problem: str) -> EngineError:
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        return EngineError(
            "\n".join([f"{self.engine.name} {problem}; its last lines:", *(f"  {line}" for line in tail)])
        )


def start(engine: Engine) -> Running:
    """Load an engine in a new process and warm it up. Raises EngineError."""
    additions, preloaded = _environment(engine)
    settings: dict[str, Any] = {"model": str(engine.model), "max_num_seqs": engine.max_num_seqs}
    settings |= {"max_model_len": engine.max_model_len, "options": dict(engine.options)}
    if engine.name in _GGUF:
        from benchmarks.cpu.gguf_file import gguf_file  # noqa: PLC0415  (others do without its package)

        settings["gguf"] = str(gguf_file(engine.model, _GGUF[engine.name]))
    handle, log = tempfile.mkstemp(prefix=f"{engine.name}-", suffix=".log")
    for weights in engine.model.glob("*.safetensors"):
        weights.read_bytes()  # so that no engine's start waits for the disk
    with os.fdopen(handle, "w") as errors:
        process = subprocess.Popen(
            [engine.python, str(engine.script), json.dumps({**settings, "started": time.time()})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | additions,
            text=True,
            start_new_session=True,  # so that what it starts can be ended with it
        )
    running = Running(engine, process, Path(log))
    try:
        warm = workload("WARM", vocab_size=SMALLEST_VOCABULARY)
        facts = running._ask({"name": "WARM", "queries": _plain(warm.queries)}, ("ready", "version", "threads"))
    except BaseException:
        running.stop()
        raise
    ready = facts.pop("ready")
    variables = {name: value for name, value in additions.items() if "/" not in value}  # the report names no folders
    running.facts = {**facts, "cold_start_seconds": ready, "environment": variables, "preloaded": preloaded}
    return running


def _plain(queries: Iterable[Query]) -> list[dict[str, Any]]:
    return [{"prompt": query.prompt, "out": query.num_output_tokens} for query in queries]


def _environment(engine: Engine) -> tuple[dict[str, str], list[str]]:
    """Variables that the engine's process gets besides ours, and the names of the libraries that are preloaded.

    vLLM would keep a core for its front end, and its own advice is to preload an allocator and an OpenMP runtime.
    """
    variables = {"HF_HUB_OFFLINE": "1"}
    if engine.name in ("quire", "http"):
        return variables | {"PYTHONPATH": str(ROOT)}, []  # this tree's quire, whatever is installed
    if engine.name != "vllm":
        return variables, []
    found = [
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1],
        *(Path(engine.python).parent.parent / "lib").glob("libiomp5.so"),
    ]
    cores = sorted(os.sched_getaffinity(0))
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": "4"}
    if found:
        variables["LD_PRELOAD"] = ":".join(map(str, found))
    return variables, [path.name for path in found]

"""Engines in processes of their own, each run by a driver that uses drivers/protocol.py. Imports no engine."""

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
BEFORE = "before"  # another version of quire
PEERS = ("vllm", "transformers", "openvino", "llama_cpp")
QUIRE = ("quire", "http", BEFORE)
# Engines that get a GGUF file, and its type by quantization: OpenVINO reads no BF16 from GGUF. A type of files as a
# quantization gives quire the same file.
_GGUF: Mapping[str | None, Mapping[str, str]] = {
    None: {"openvino": "F16", "llama_cpp": "BF16"},
    "int8": {"openvino": "Q8_0", "llama_cpp": "Q8_0"},
    "int4": {"openvino": "Q4_0", "llama_cpp": "Q4_0"},
    **{kind: dict.fromkeys((*QUIRE, "openvino", "llama_cpp"), kind) for kind in ("Q8_0", "Q4_0", "Q4_K_M")},
}
QUANTIZATIONS = tuple(name for name in _GGUF if name is not None)
_PATIENCE = 60.0  # seconds for an engine to exit before it is killed


class EngineError(Exception):
    """An engine failed or gave a wrong answer."""


@dataclass(frozen=True)
class Engine:
    """How to start an engine: its program, interpreter that has the engine, settings of the driver.

    name: PROGRAM, or PROGRAM:WHAT with a quantization or an option of its own. model: folder of a checkpoint, or a
    .gguf file. decode_bytes: those of `benchmarks.cpu.decode_bytes`.
    """

    name: str
    python: str
    model: Path
    max_num_seqs: int = 32
    max_model_len: int = 4096
    driver: Path | None = None  # a driver script other than the one of that name
    checkout: Path = ROOT  # of quire: which version is imported
    options: Mapping[str, Any] = field(default_factory=dict)  # engine options that replace the driver's own
    quantization: str | None = None  # of the weights; vllm and transformers keep 16 bits
    decode_bytes: tuple[int, int] | None = None

    @property
    def program(self) -> str:
        """The name of its driver."""
        return self.name.partition(":")[0]

    @property
    def script(self) -> Path:
        """Path of the driver script."""
        return self.driver or DRIVERS / f"{self.program}_driver.py"

    @property
    def gguf_type(self) -> str | None:
        """The type of the GGUF file that it loads, or None if it loads the checkpoint."""
        return _GGUF[self.quantization].get(self.program)


@dataclass(frozen=True)
class Answer:
    """Duration of a workload. ttft: seconds to the first token of a single query; None with one output token.

    cpu_seconds: of the driver's process, without its children.
    """

    seconds: float
    ttft: float | None
    cpu_seconds: float


@dataclass
class Running:
    """A loaded and warmed-up engine, stopped between its turns.

    `facts`: what the driver reported, and how it was started.
    """

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
        """Answer all queries at once. Raises EngineError, also if an output has another length than requested."""
        question = {"name": work.name, "queries": _plain(work.queries)}
        answer = self._ask(question, ("seconds", "ttft", "cpu_seconds", "num_tokens"))
        wanted = [query.num_output_tokens for query in work.queries]
        if answer["num_tokens"] != wanted:
            raise self._error(f"{work.name}: outputs have {answer['num_tokens']} tokens, asked for were {wanted}")
        return Answer(answer["seconds"], answer["ttft"], answer["cpu_seconds"])

    def answer(self, queries: Sequence[Mapping[str, Any]]) -> tuple[float, list[int]]:
        """Seconds and output token counts of queries in the drivers' format. Output lengths are not checked."""
        found = self._ask({"name": "forms", "queries": list(queries)}, ("seconds", "num_tokens"))
        return found["seconds"], found["num_tokens"]

    def answer_in_steps(self, queries: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
        """Seconds of queries in the drivers' format, and the number of model steps."""
        found = self._ask({"name": "steps", "queries": list(queries)}, ("seconds", "steps"))
        return found["seconds"], found["steps"]

    def memory(self) -> dict[str, Any]:
        """Resident bytes of all processes of the engine, and whether they are PSS or RSS."""
        return self._ask({"memory": True}, ("bytes", "kind"))

    def stop(self) -> None:
        """Close the engine's input, wait for its exit, and kill its remaining processes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self.process.stdin.close()
                self.process.wait(_PATIENCE)
        finally:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.process.stdout.close()
            self.log.unlink(missing_ok=True)

    def _ask(self, question: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        try:
            return self._answer(question, keys)
        finally:
            self._signal(signal.SIGSTOP)  # idle processes of some engines poll, which would slow the others

    def _answer(self, question: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
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

    def _signal(self, number: int) -> None:
        """Send a signal to all processes of the engine that still run."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _error(self, problem: str) -> EngineError:
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        return EngineError(
            "\n".join([f"{self.engine.name} {problem}; its last lines:", *(f"  {line}" for line in tail)])
        )


def start(engine: Engine) -> Running:
    """Load an engine in a new process and warm it up. Raises EngineError."""
    additions, preloaded = environment(engine)
    settings: dict[str, Any] = {"model": str(engine.model), "max_num_seqs": engine.max_num_seqs}
    options = dict(engine.options)
    if engine.quantization is not None and engine.program in QUIRE and not engine.gguf_type:
        options["quantization"] = engine.quantization
    settings |= {"max_model_len": engine.max_model_len, "options": options}
    if engine.model.suffix == ".gguf":
        settings |= {"gguf": str(engine.model), "gguf_type": engine.model.name}
    elif kind := engine.gguf_type:
        from benchmarks.cpu.gguf_file import gguf_file, types  # noqa: PLC0415  (few engines need the package gguf)

        file = gguf_file(engine.model, kind)
        settings |= {"gguf": str(file), "gguf_type": f"{kind}: {types(file)}"}
    handle, log = tempfile.mkstemp(prefix=f"{engine.name}-", suffix=".log")
    for weights in engine.model.glob("*.safetensors"):
        weights.read_bytes()  # into the page cache, so that no engine waits for the disk
    with os.fdopen(handle, "w") as errors:
        process = subprocess.Popen(
            [engine.python, str(engine.script), json.dumps({**settings, "started": time.time()})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | additions,
            text=True,
            start_new_session=True,  # so that `stop` can kill the descendants too
        )
    running = Running(engine, process, Path(log))
    try:
        warm = workload("WARM", vocab_size=SMALLEST_VOCABULARY)
        facts = running._ask({"name": "WARM", "queries": _plain(warm.queries)}, ("ready", "version", "threads"))
    except BaseException:
        running.stop()
        raise
    ready = facts.pop("ready")
    variables = {name: value for name, value in additions.items() if "/" not in value}  # no paths in the report
    running.facts = {**facts, "cold_start_seconds": ready, "environment": variables, "preloaded": preloaded}
    if engine.decode_bytes is not None:
        running.facts["decode_bytes"] = dict(zip(("weights", "kv_per_token"), engine.decode_bytes, strict=True))
    return running


def _plain(queries: Iterable[Query]) -> list[dict[str, Any]]:
    return [{"prompt": query.prompt, "out": query.num_output_tokens} for query in queries]


def environment(engine: Engine) -> tuple[dict[str, str], list[str]]:
    """Environment variables added for the engine's process, and the names of the preloaded libraries.

    Without them vLLM would reserve a core for its front end. Its documentation advises to preload an allocator and an
    OpenMP runtime.
    """
    variables = {"HF_HUB_OFFLINE": "1"}
    if engine.program in QUIRE:
        return variables | {"PYTHONPATH": str(engine.checkout)}, []  # not an installed quire
    if engine.program != "vllm":
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

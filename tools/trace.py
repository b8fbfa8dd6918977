"""The path of one request through the files and functions of quire, measured on the embedded model.

    python -m tools.trace [--scenes offline,http,admission,step] [--json FILE]

offline: one request of 8 greedy tokens through LLM. http: a streamed chat of 8 tokens through the app, with the engine
on a thread of this process. admission: one admission of an offline request. step: one call of Engine.step, a decode
step of an offline request. Warm-up requests run first. A call is one entered frame: each resumption of a generator
counts.
"""

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import quire
from benchmarks.result_file import write_result
from quire.config import EngineOptions
from quire.fleet.fleet import Fleet
from quire.server.app import make_app
from quire.server.batch.in_process_client import post
from quire.server.service import Service
from quire.startup.build import build
from quire.startup.model_info import model_info_of
from quire.supervisor.engine_handle import EngineThread

PACKAGE = Path(quire.__file__).parent
SIZES = {"speculation": "off", "max_num_seqs": 4, "memory": "256MiB", "dtype": "float32"}
PROMPT = "One Tuesday Mira went to the"
SAMPLING = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hello! Who are you?"}], "stream": True, **SAMPLING}


class Function(NamedTuple):
    """A function of quire. file: relative to the package. name: qualified name."""

    file: str
    name: str


ADMISSION = Function("cache/kv_cache.py", "KVCache.admit")
STEP = Function("engine/engine.py", "Engine.step")


class Trace:
    """The calls of one recorded path."""

    def __init__(self) -> None:
        self.calls: dict[Function, int] = {}  # in order of the first call
        self.depth = 0  # most counted frames on one stack

    def report(self) -> dict[str, Any]:
        """The counts, and the functions by file in order of the first call."""
        files: dict[str, list[str]] = {}
        for function in self.calls:
            files.setdefault(function.file, []).append(function.name)
        counts = {"files": len(files), "functions": len(self.calls), "calls": sum(self.calls.values())}
        return {**counts, "depth": self.depth, "path": files}


class Recorder:
    """Records calls of quire's functions in this thread and in threads that start after its construction."""

    def __init__(self) -> None:
        self._functions: dict[CodeType, Function | None] = {}
        self._stacks = threading.local()
        self._trace: Trace | None = None
        self._below: Function | None = None
        self._skip = 0
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    @contextmanager
    def recorded(self, below: Function | None = None, call: int = 1) -> Iterator[Trace]:
        """The calls in the block. below: only those within call number `call` of this function, itself included.

        Raises LookupError if that call does not happen.
        """
        trace, self._below, self._skip = Trace(), below, call
        self._trace = trace
        try:
            yield trace
        finally:
            self._trace = None
        if not trace.calls:
            raise LookupError(f"{below} was not called {call} times")

    def _event(self, frame: FrameType, event: str, _argument: object) -> None:
        if event not in ("call", "return") or (function := self._function(frame.f_code)) is None:
            return
        stack: list[bool] = self._stacks.__dict__.setdefault("stack", [])  # whether each frame of quire is counted
        if event == "return":
            if stack:
                stack.pop()
            return
        trace = self._trace
        counts = trace is not None and (self._below is None or any(stack) or self._begins(function))
        stack.append(counts)
        if counts and trace is not None:
            trace.calls[function] = trace.calls.get(function, 0) + 1
            trace.depth = max(trace.depth, sum(stack))

    def _begins(self, function: Function) -> bool:
        self._skip -= function == self._below
        return function == self._below and self._skip == 0

    def _function(self, code: CodeType) -> Function | None:
        if code not in self._functions:
            path = Path(code.co_filename)
            inside = path.is_relative_to(PACKAGE) and not code.co_name.startswith("<")
            found = Function(path.relative_to(PACKAGE).as_posix(), code.co_qualname) if inside else None
            self._functions[code] = found
        return self._functions[code]


def offline_traces(recorder: Recorder) -> dict[str, Trace]:
    """The traces offline, admission and step."""
    llm = quire.LLM(**SIZES, enable_prefix_caching=True)
    params = quire.SamplingParams(**SAMPLING)
    prompts = iter(f"{name} {PROMPT}" for name in ("First.", "Second.", "Third.", "Fourth."))  # none is in the cache
    llm.generate(next(prompts), params, use_tqdm=False)
    found = {}
    for name, (below, call) in {"offline": (None, 1), "admission": (ADMISSION, 1), "step": (STEP, 5)}.items():
        with recorder.recorded(below, call) as found[name]:
            llm.generate(next(prompts), params, use_tqdm=False)
    return found


async def http_trace(recorder: Recorder) -> dict[str, Trace]:
    """The trace http. Raises RuntimeError if the chat fails."""
    built = build(EngineOptions(**SIZES), report=lambda line: None, progress=lambda done, total: None)
    facts = model_info_of(built)
    host = EngineThread(built.engine, facts)
    host.launch()
    app = make_app(Service(facts, built.tokenizer, Fleet(host)))
    body = json.dumps({"model": facts.model_name, **CHAT}).encode()
    async with app.router.lifespan_context(app):
        await post(app, "/v1/chat/completions", body)
        with recorder.recorded() as trace:
            answer = await post(app, "/v1/chat/completions", body)
        if answer.status != 200 or b"[DONE]" not in answer.body:
            raise RuntimeError(f"the chat failed with {answer.status}: {answer.body!r:.500}")
    return {"http": trace}


def main() -> None:
    """Print the selected traces, and write them to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", default="offline,http,admission,step")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    recorder = Recorder()
    found = {**offline_traces(recorder), **asyncio.run(http_trace(recorder))}
    report = {name: found[name].report() for name in options.scenes.split(",")}
    for name, one in report.items():
        print(
            f"\n{name}: {one['files']} files, {one['functions']} functions, {one['calls']} calls, depth {one['depth']}"
        )
        for file, names in one["path"].items():
            print(f"  {file:45} {', '.join(names)}")
    if options.json is not None:
        write_result(options.json, {"python": sys.version.split()[0], **report})


if __name__ == "__main__":
    main()

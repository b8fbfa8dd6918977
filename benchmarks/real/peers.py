"""quire and llama.cpp with the same file: perplexity, one stream, a prompt, streams over HTTP, a chat of eight turns.

Both compute in turns, quire without drafts. `in process` is through the drivers of `benchmarks.cpu`. Over HTTP,
llama.cpp is its own server if --llama-server names it, or else llama-cpp-python's, which answers one request at a time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.cpu.engines import Engine
from benchmarks.cpu.turns import Turns
from benchmarks.real.model import model_file
from benchmarks.real.schemes import EXACT, WINDOW, schemes, text_ids
from benchmarks.real.servers import QUIRE, Server, serving, stream_all
from benchmarks.real.texts import gpl, python_reference
from benchmarks.workloads import Query, Workload
from quire.tokenizer.gguf import read_gguf_tokenizer

_STREAM = (128, 128)  # tokens of prompt and output
_STREAMS = (1, 8, 32)
_CHARACTERS, _OUTPUT = 300, 64  # of a prompt, and tokens of its output
_QUESTIONS = (
    "What is free software?",
    "Who writes it?",
    "How do its authors earn money?",
    "What is a licence?",
    "Which licences are there?",
    "What does copyleft mean?",
    "May I sell a copy?",
    "What should I read next?",
)
_NAME = "smollm2"
_CONSOLE = Console(stderr=True)
Figures = dict[str, float]


def peers(llama_cpp: str, llama_server: str | None, rounds: int = 3) -> list[dict[str, Any]]:
    """A row for quire and one for llama.cpp; then the ratios of quire to llama.cpp, medians over rounds.

    llama_cpp: interpreter that has llama-cpp-python. llama_server: program of llama.cpp. Raises EngineError.
    """
    ours: dict[str, Any] = {"engine": "quire"}
    theirs: dict[str, Any] = {"engine": "llama.cpp"}
    ratios: dict[str, Any] = {"engine": "quire over llama.cpp"}
    _add_perplexity(ours, theirs, ratios, llama_cpp)
    _add_in_process(ours, theirs, ratios, llama_cpp, rounds)
    _add_over_http(ours, theirs, ratios, _command(llama_cpp, llama_server), rounds)
    theirs["server"] = "llama-server" if llama_server else "llama_cpp.server, one request at a time"
    return [ours, theirs, ratios]


def _add_perplexity(ours: dict[str, Any], theirs: dict[str, Any], ratios: dict[str, Any], python: str) -> None:
    exact, stored = schemes((EXACT, "stored:auto"), WINDOW, rounds=0)
    texts = text_ids(WINDOW)
    driver = Path(__file__).parent / "drivers" / "llama_cpp_perplexity.py"
    asked = json.dumps({"gguf": str(model_file()), "texts": list(texts.values())})
    done = subprocess.run([python, str(driver)], input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python} cannot compute the perplexity by llama.cpp:\n{done.stderr[-2000:]}")
    for name, mean in zip(texts, json.loads(done.stdout), strict=True):
        key = f"{name}: perplexity"
        ours[key], theirs[key] = stored[key], round(exp(mean), 4)
        ratios[key] = round(ours[key] / theirs[key], 5)
        for row in (ours, theirs):
            row[f"{name}: over exact"] = round(row[key] / exact[key], 5)


def _add_in_process(
    ours: dict[str, Any], theirs: dict[str, Any], ratios: dict[str, Any], python: str, rounds: int
) -> None:
    ids = read_gguf_tokenizer(model_file()).encode(gpl())

    def make(name: str, seed: int) -> Workload:
        length, output = {"one stream": _STREAM, "prompt of 2048": (WINDOW, 1)}[name]
        return Workload(name, seed, [Query(ids[100 * seed : 100 * seed + length], output)])

    engines = [Engine("quire", sys.executable, model_file()), Engine("llama_cpp", python, model_file())]
    turns = Turns(engines, ["one stream", "prompt of 2048"], repeat=rounds, make=make)
    turns.side_by_side(lambda doing: None)
    report = turns.report()
    for work, what in (("one stream", "decode tok/s"), ("prompt of 2048", "prompt tok/s")):
        found, name = report["workloads"][work], f"in process, {work}, tok/s"
        for row, engine in ((ours, "quire"), (theirs, "llama_cpp")):
            row[name] = round(found["figures"][engine][what]["median"], 1)
        ratios[name] = round(found["ratios"]["llama_cpp"][what]["median"], 3)
    for row, engine in ((ours, "quire"), (theirs, "llama_cpp")):
        row["memory, MB"] = round(turns.facts[engine]["memory"]["bytes"] / 1e6)
        row["version"] = turns.facts[engine]["version"]


def _command(python: str, program: str | None) -> list[str]:
    """The command that serves the file by llama.cpp."""
    threads = str(len(os.sched_getaffinity(0)))
    if program is None:
        words = ["--model", str(model_file()), "--port", "PORT", "--n_ctx", "4096", "--n_threads", threads]
        return [python, "-m", "llama_cpp.server", *words]
    most = max(_STREAMS)
    return [
        *(program, "-m", str(model_file()), "--port", "PORT", "--threads", threads),
        *("--parallel", str(most), "--ctx-size", str(4096 * most)),
    ]


def _add_over_http(
    ours: dict[str, Any], theirs: dict[str, Any], ratios: dict[str, Any], command: list[str], rounds: int
) -> None:
    own = [*QUIRE, str(model_file()), "--port", "PORT", "--speculation", "off", "--memory", "4GiB"]
    own += ["--served-model-name", _NAME, "--max-model-len", "4096", "--max-num-seqs", str(max(_STREAMS))]
    loads: dict[str, Callable[[str, int], Figures]] = {
        **{f"{count} streams": lambda url, turn, count=count: _streams(url, count, turn) for count in _STREAMS},
        "prompt of 2048": _prompt,
        "chat of 8 turns": _chat,
    }
    found: dict[str, list[tuple[float, float]]] = {}  # name -> (quire, llama.cpp) of each round
    with ExitStack() as stack:
        servers: list[Server] = []
        for words in (own, command):
            servers.append(stack.enter_context(serving(words)))
            _streams(servers[-1].url, 2, -1)
            servers[-1].pause()
        for load, run in loads.items():
            for turn in track(range(rounds), load, console=_CONSOLE, transient=True):
                pair: dict[int, Figures] = {}
                for i in (0, 1) if turn % 2 else (1, 0):
                    servers[i].resume()
                    pair[i] = run(servers[i].url, turn)
                    servers[i].pause()
                for what in pair[0]:
                    found.setdefault(f"HTTP, {load}, {what}", []).append((pair[0][what], pair[1][what]))
    for name, pairs in found.items():
        for row, values in zip((ours, theirs), zip(*pairs, strict=True), strict=True):
            row[name] = round(median(values), 3 if name.endswith(" s") else 1)
        better = [b / a if name.endswith(" s") else a / b for a, b in pairs]
        ratios[name] = round(median(better), 3)


def _streams(url: str, count: int, turn: int) -> Figures:
    """`count` completions at once, each of another part of the text."""
    text = python_reference()
    places = [20_000 * (turn + 1) + 500 * i for i in range(count)]
    bodies = [_body(prompt=text[place : place + _CHARACTERS], max_tokens=_OUTPUT) for place in places]
    seconds, answers = stream_all(url, "/v1/completions", bodies)
    return {"tok/s": sum(answer.num_tokens for answer in answers) / seconds}


def _prompt(url: str, turn: int) -> Figures:
    """A text of 2048 tokens: llama-cpp-python's server takes no token ids."""
    tokenizer = read_gguf_tokenizer(model_file())
    ids = tokenizer.encode(gpl())[200 * turn + 50 : 200 * turn + 50 + WINDOW]
    body = _body(prompt=tokenizer.decode(ids), max_tokens=1)
    seconds, _ = stream_all(url, "/v1/completions", [body])
    return {"tok/s": WINDOW / seconds}


def _chat(url: str, turn: int) -> Figures:
    """Questions one after another, each with the talk before it."""
    talk: list[dict[str, str]] = [{"role": "system", "content": f"You are assistant {turn}. " + gpl()[2000:3500]}]
    total, firsts = 0.0, []
    for question in _QUESTIONS:
        talk.append({"role": "user", "content": question})
        seconds, (answer,) = stream_all(url, "/v1/chat/completions", [_body(messages=talk, max_tokens=_OUTPUT)])
        talk.append({"role": "assistant", "content": answer.text})
        total += seconds
        firsts.append(answer.first)
    return {"s": total, "first token after the first turn s": median(firsts[1:])}


def _body(**fields: object) -> dict[str, Any]:
    return {"model": _NAME, "temperature": 0, "ignore_eos": True, **fields}

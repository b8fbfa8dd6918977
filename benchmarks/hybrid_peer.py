"""A model with recurrent states in quire and in llama.cpp: streams over HTTP, and the first token of two turns.

    python -m benchmarks.hybrid_peer --llama-server PROGRAM [--shape hybrid-0.5b] [--rounds 2] [--models FOLDER]
        [--json FILE]

Both serve one GGUF file in Q8_0 with random weights, quire without drafts, and take turns. docs/real_model.md says how
llama.cpp's server is built.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu.checkpoints import checkpoint
from benchmarks.cpu.machine import describe
from benchmarks.real.servers import QUIRE, Server, serving, stream_all
from benchmarks.real.texts import gpl
from benchmarks.result_file import write_result

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "rigs"))
from gguf_writer import write_gguf

_NAME = "hybrid"
_STREAMS = (1, 8)
_CHARACTERS, _OUTPUT = 200, 64  # of a prompt, and tokens of its output
_LONG = 3000  # characters of the first turn
_CONTEXT = 4096
_PADDING = 2  # tokens that `write_gguf` adds


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--shape", default="hybrid-0.5b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = gguf_of(options.shape, options.models or Path(folder))
        rows = compare(file, options.llama_server, options.rounds)
    for what, (ours, theirs) in rows.items():
        print(f"{what:<24} quire {ours:9.3f}   llama.cpp {theirs:9.3f}")
    if options.json is not None:
        figures = {what: {"quire": ours, "llama.cpp": theirs} for what, (ours, theirs) in rows.items()}
        write_result(options.json, {"machine": describe(), "shape": options.shape, "figures": figures})


def gguf_of(shape: str, models: Path) -> Path:
    """The GGUF file of a random checkpoint. Its tokenizer has as many tokens as the model, as llama.cpp wants it."""
    source, folder = checkpoint(shape, models), models / f"{shape}-gguf"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {text: token for text, token in vocabulary.items() if token < size - _PADDING}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return write_gguf(folder, models / f"{shape}.gguf", kind="Q8_0")


def compare(file: Path, program: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Medians of quire and of llama.cpp, by figure."""
    threads = str(len(os.sched_getaffinity(0)))
    ours = [*QUIRE, str(file), "--port", "PORT", "--speculation", "off", "--memory", "6GiB"]
    ours += ["--served-model-name", _NAME, "--max-model-len", str(_CONTEXT), "--max-num-seqs", str(max(_STREAMS))]
    theirs = [program, "-m", str(file), "--port", "PORT", "--threads", threads]
    theirs += ["--parallel", str(max(_STREAMS)), "--ctx-size", str(_CONTEXT * max(_STREAMS))]
    found: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        servers: list[Server] = []
        for words in (ours, theirs):
            servers.append(stack.enter_context(serving(words)))
            _streams(servers[-1].url, 2, -1)
            servers[-1].pause()
        for turn in range(rounds):
            for i in (0, 1) if turn % 2 else (1, 0):
                servers[i].resume()
                for what, value in _figures(servers[i].url, turn).items():
                    found.setdefault(what, [[], []])[i].append(value)
                servers[i].pause()
    return {what: (median(some), median(other)) for what, (some, other) in found.items()}


def _figures(url: str, turn: int) -> dict[str, float]:
    figures = {f"{count} streams, tok/s": _streams(url, count, turn) for count in _STREAMS}
    text = gpl()[400 * turn :]
    talk = [{"role": "user", "content": text[:_LONG]}]
    first, answer = _first_token(url, talk)
    talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": text[_LONG : _LONG + 200]}]
    second, _ = _first_token(url, talk)
    return figures | {"first token, turn 1, s": first, "first token, turn 2, s": second}


def _streams(url: str, count: int, turn: int) -> float:
    """Tokens per second of `count` completions at once, each of another part of the text."""
    places = [5_000 * (turn + 1) + 400 * i for i in range(count)]
    bodies = [_body(gpl()[place : place + _CHARACTERS], _OUTPUT) for place in places]
    seconds, answers = stream_all(url, "/v1/completions", bodies)
    return sum(answer.num_tokens for answer in answers) / seconds


def _first_token(url: str, talk: list[dict[str, str]]) -> tuple[float, str]:
    """Seconds until the first text of an answer in a chat, and its text."""
    _, (answer,) = stream_all(url, "/v1/chat/completions", [_body(talk, 16)])
    return answer.first, answer.text


def _body(asked: str | list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    """The body of a completion, or of a chat."""
    what = {"prompt": asked} if isinstance(asked, str) else {"messages": asked}
    return {"model": _NAME, "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens} | what


if __name__ == "__main__":
    main()

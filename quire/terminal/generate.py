"""`quire generate`: texts that continue prompts, in the terminal or a pipe."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from quire.control_characters import visible
from quire.engine.outputs import RequestOutput
from quire.errors import RequestError
from quire.params import SamplingParams, StructuredOutputsParams
from quire.terminal.chat import json_file

STDIN = "-"  # the prompt that stands for standard input


class TextModel(Protocol):
    """What the command needs of `quire.LLM`, which takes seconds to import."""

    def stream_generate(self, prompt: str, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """See LLM.stream_generate."""

    def generate(self, prompts: Sequence[str], sampling_params: SamplingParams | None = None) -> list[RequestOutput]:
        """See LLM.generate."""


def read_prompts(given: Sequence[str]) -> Sequence[str]:
    """The prompts of a command line: `-`, or none at all, is standard input. Raises RequestError if that is empty."""
    prompts = given or [STDIN]
    if STDIN not in prompts:
        return prompts
    if sys.stdin.isatty():
        sys.stderr.write("reading the prompt from the terminal; Ctrl-D ends it\n")
    read = sys.stdin.read().removesuffix("\n")
    if not read:
        raise RequestError("standard input is empty; give a prompt, or a text through a pipe")
    return [read if one == STDIN else one for one in prompts]


def schema_constraint(file: Path | None) -> StructuredOutputsParams | None:
    """The constraint of the JSON schema in a file; None without a file. Raises RequestError."""
    return None if file is None else StructuredOutputsParams(json=json.dumps(json_file(str(file))))


def write_texts(llm: TextModel, prompts: Sequence[str], params: SamplingParams) -> None:
    """Generate and print. The one text of one prompt is printed as it comes."""
    if len(prompts) == params.n == 1 and params.best_of in (None, 1):
        for piece in llm.stream_generate(prompts[0], params):
            _write(piece)
        _write("\n")
        return
    for result in llm.generate(prompts, params):
        for output in result.outputs:
            _write(f"{output.text}\n")


def _write(text: str) -> None:
    """Write what a model generated: to a terminal with control characters shown, to a file or pipe as it is."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()

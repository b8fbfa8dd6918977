"""`vllm serve` as `quire serve`: translates the arguments, and becomes the server.

    python -m benchmarks.server_cases.vllm_options MODEL [vLLM's options]

The embedded model is served under the name MODEL, and adapters under theirs: it answers to all. Options that quire
lacks are left out, and named in a line that begins with `left out`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.params import MAX_LOGPROBS

MAX_MODEL_LEN = 2048  # of the embedded model
LEFT_OUT = "left out"
_MAX_LOGPROBS_OF_VLLM = 20  # without the option
_QUIRE = str(Path(sys.executable).with_name("quire"))
_ALWAYS = ("--port", "0", "--memory", "512MiB", "--metrics-prefix", "vllm:")
# vLLM's options that quire has under the same name: those with a value, and those without.
_WITH_VALUE = frozenset(
    {"--max-num-seqs", "--max-num-batched-tokens", "--tool-call-parser", "--reasoning-parser", "--root-path"}
)
_FLAGS = frozenset({"--enable-auto-tool-choice", "--no-enable-prefix-caching", "--enable-force-include-usage"})


def translated(model: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of `quire serve`, and the names of vLLM's options that quire lacks."""
    options, names, adapters, left_out, max_logprobs = [], [], [], [], _MAX_LOGPROBS_OF_VLLM
    pieces = [piece for argument in arguments for piece in _split(argument)]
    while pieces:
        name, values = pieces.pop(0), []
        while pieces and not pieces[0].startswith("--"):
            values.append(pieces.pop(0))
        if name == "--max-model-len":
            options += [name, str(min(int(values[0]), MAX_MODEL_LEN))]
        elif name == "--max-logprobs":
            max_logprobs = min(int(values[0]), MAX_LOGPROBS)
        elif name == "--served-model-name":
            names += values
        elif name == "--lora-modules":
            adapters += [value.partition("=")[0] for value in values]
        elif name in _WITH_VALUE or name in _FLAGS:
            options += [name, *values]
        elif name != "--port":  # a free one is taken
            left_out.append(name)
    options += ["--max-logprobs", str(max_logprobs)]
    for served in (*(names or [model]), *adapters):
        options += ["--served-model-name", served]
    return options, left_out


def _split(argument: str) -> list[str]:
    """`--name=value` in two pieces."""
    return argument.split("=", 1) if argument.startswith("--") else [argument]


def main() -> None:
    """See the module. vLLM's variable for the API key becomes quire's."""
    options, left_out = translated(sys.argv[1], sys.argv[2:])
    print(LEFT_OUT, *left_out, flush=True)
    environment = dict(os.environ)
    if "VLLM_API_KEY" in environment:
        environment["QUIRE_API_KEY"] = environment["VLLM_API_KEY"]
    os.execve(_QUIRE, [_QUIRE, "serve", *_ALWAYS, *options], environment)


if __name__ == "__main__":
    main()

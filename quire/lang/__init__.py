"""The language: programs of prompts and model calls. `import quire.lang as sgl` runs programs written for SGLang.

The import does not load torch; calls of `Engine` and `Runtime` do. See docs/language.md.
"""

from quire.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from quire.lang.backends.openai import OpenAI
from quire.lang.backends.server import RuntimeEndpoint
from quire.lang.errors import BackendClosed, Cancelled, GenerationFailed
from quire.lang.function import Function, flush_cache, function, global_config, set_default_backend
from quire.lang.local import Engine, Runtime
from quire.lang.program_state import ProgramState, ProgramStateGroup
from quire.lang.select import (
    ChoicesDecision,
    ChoicesSamplingMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

__all__ = [
    "BackendClosed",
    "Cancelled",
    "ChoicesDecision",
    "ChoicesSamplingMethod",
    "Engine",
    "Function",
    "GenerationFailed",
    "OpenAI",
    "ProgramState",
    "ProgramStateGroup",
    "Runtime",
    "RuntimeEndpoint",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

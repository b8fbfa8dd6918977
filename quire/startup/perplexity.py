"""Perplexity of a text under a model, computed by the engine that serves it."""

from collections.abc import Sequence
from contextlib import closing
from math import exp

import numpy as np

from quire.config import EngineOptions
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.errors import ConfigError, ModelError
from quire.models.model import Progress
from quire.params import SamplingParams
from quire.startup.build import Prepared, build, prepare
from quire.startup.freed_memory import return_freed_memory
from quire.startup.token_windows import WINDOW, token_windows

PERPLEXITY_TOKENS = 8192  # of a text, at most
_REPORTED = SamplingParams(max_tokens=0, prompt_logprobs=0)


def perplexity(
    engine: Engine,
    token_ids: Sequence[int],
    *,
    window: int = WINDOW,
    bos_token_id: int | None = None,
    progress: Progress = lambda _done, _total: None,
) -> float:
    """exp of the mean negative logprob of a text's tokens. See `token_logprobs`."""
    logprobs = token_logprobs(engine, token_ids, window=window, bos_token_id=bos_token_id, progress=progress)
    return exp(-logprobs.mean())


def token_logprobs(
    engine: Engine,
    token_ids: Sequence[int],
    *,
    window: int = WINDOW,
    bos_token_id: int | None = None,
    progress: Progress = lambda _done, _total: None,
) -> np.ndarray:
    """float64 natural logarithms of the probabilities of a text's tokens.

    The text is cut into windows of `window` tokens. Each token has the tokens before it in its window as context, so
    the first one of a window has no logprob. The windows are prompts of an idle engine: weights, kernels, KV types and
    chunks of prompts are those of requests. bos_token_id: if `token_ids` begins with it, so does each window.
    progress(done, total): receives tokens.
    Raises ConfigError for fewer than two tokens and for a window that does not fit, ModelError if a step fails.
    """
    if len(token_ids) < 2 or not 2 <= window <= engine.max_model_len:
        raise ConfigError(
            f"{len(token_ids)} tokens in windows of {window} have no perplexity under a model with a context of "
            f"{engine.max_model_len}; give a longer text, or a window of 2 to {engine.max_model_len} tokens"
        )
    found: list[np.ndarray] = []
    done, windows = 0, token_windows(token_ids, window, bos_token_id)
    for number, ids in enumerate(windows):
        engine.add(Request(f"perplexity-{number}", ids, _REPORTED))
        while engine.has_work:
            for output in engine.step():
                if output.error:
                    raise ModelError(f"the perplexity cannot be computed: {output.error}")
                if output.prompt_logprobs is not None:
                    found.append(output.prompt_logprobs.values[:, 0].astype(np.float64))
        done += len(ids)
        progress(done, sum(map(len, windows)))
    return np.concatenate(found)


def perplexities(
    models: Sequence[EngineOptions], token_ids: Sequence[int], *, progress: Progress
) -> tuple[list[float], int]:
    """The perplexity of a text under each model, and the tokens of a window: WINDOW, or what all contexts have.

    The models are loaded one after the other. token_ids: of the tokenizer that they share. progress(done, total):
    receives tokens. Raises ConfigError, ModelError, and RequestError for a model that makes no text.
    """
    window = min(WINDOW, *(_prepared(one).scheduler_config.max_model_len for one in models))
    found: list[float] = []
    for number, options in enumerate(models):

        def advance(done: int, total: int, before: int = number) -> None:
            progress(before * total + done, len(models) * total)

        built = build(options, report=_ignore, progress=_ignore)
        bos_token_id = built.tokenizer.bos_token_id
        with closing(built.engine) as engine:
            found.append(perplexity(engine, token_ids, window=window, bos_token_id=bos_token_id, progress=advance))
        del built, engine
        return_freed_memory()
    return found, window


def _prepared(options: EngineOptions) -> Prepared:
    return prepare(options, report=_ignore, progress=_ignore)


def _ignore(*_: object) -> None:
    """Ignore a line, or the progress."""

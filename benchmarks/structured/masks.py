"""Compile time and time per mask of each backend, over random walks that end as early as they can."""

import random
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.structured import xgrammar_peer
from benchmarks.structured.forms import FORMS
from quire.core.constraint import Grammar
from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs import backends as quire_backends
from quire.structured_outputs.vocabulary import Vocabulary

WALKS = 20
_WARM = StructuredOutputsParams(choice=("a", "b"))
MAX_TOKENS = 120


def measure(backends: list[str], vocabularies: dict[str, Vocabulary]) -> list[dict[str, Any]]:
    """A row for each constraint, backend and vocabulary; a rejected constraint has a row that says so.

    The time that a backend needs once per vocabulary is a row of its own.
    """
    first = []
    for name, vocabulary in vocabularies.items():
        for backend in backends:
            start = time.perf_counter()
            _compile(_WARM, vocabulary, backend)
            milliseconds = (time.perf_counter() - start) * 1e3
            first.append({"form": "(vocabulary)", "backend": backend, "vocabulary": name, "compile_ms": milliseconds})
    return first + [
        {"form": form, "backend": backend, "vocabulary": name, **_measure(asked, backend, vocabulary)}
        for name, vocabulary in vocabularies.items()
        for form, asked in FORMS.items()
        for backend in backends
    ]


def _compile(asked: StructuredOutputsParams, vocabulary: Vocabulary, backend: str) -> Grammar:
    if backend == "xgrammar":
        return xgrammar_peer.compile_grammar(asked, vocabulary)
    return quire_backends.compile(asked, vocabulary, backend)


def _measure(asked: StructuredOutputsParams, backend: str, vocabulary: Vocabulary) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        grammar = _compile(asked, vocabulary, backend)
    except RequestError as error:
        return {"refused": str(error)}
    compiled = time.perf_counter() - start
    masks: list[float] = []
    advances: list[float] = []
    words = np.zeros(vocabulary.num_words, np.uint32)
    num_tokens = num_forced = num_done = 0
    rng = random.Random(0)
    ends = set(vocabulary.end_ids)
    for _ in range(WALKS):
        matcher = grammar.new_matcher(fast_forward=True)
        verdict = matcher.advance([])
        for _ in range(MAX_TOKENS):
            num_tokens += len(verdict.forced)
            num_forced += len(verdict.forced)
            if verdict.is_over or verdict.error:
                num_done += verdict.is_over
                break
            words[:] = 0
            began = time.perf_counter()
            matcher.fill_bitmask(words)
            masks.append(time.perf_counter() - began)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed))
            if token in ends:
                num_done += 1
                break
            num_tokens += 1
            began = time.perf_counter()
            verdict = matcher.advance([token])
            advances.append(time.perf_counter() - began)
    return {
        "compile_ms": compiled * 1e3,
        "first_mask_us": masks[0] * 1e6 if masks else None,
        **_spread("mask", masks),
        **_spread("advance", advances),
        "forced_share": num_forced / max(1, num_tokens),
        "ended": num_done / WALKS,
    }


def _spread(name: str, seconds: list[float]) -> dict[str, float | None]:
    if len(seconds) < 2:
        return {f"{name}_p50_us": None, f"{name}_p99_us": None}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"{name}_p50_us": cuts[49] * 1e6, f"{name}_p99_us": cuts[98] * 1e6}

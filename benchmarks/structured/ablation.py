"""Row R7: a batch of programs with each feature off in turn.

A program has a story of its own behind rules that all programs share. It forks into questions about the story, whose
answers are JSON, and joins. Many programs run at once over a cache that holds about half of their stories. API
speculation is for endpoints without constraints: a program that fills in a form runs on a server's OpenAI route, with
it and without.
"""

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import Any

import quire.lang as sgl
from benchmarks.trust.server import served
from quire.hub import embedded
from quire.lang.backends.engine import EngineBackend
from quire.tokenizer.tokenizer import Tokenizer
from tools.demo_model.exercises import BORROWINGS
from tools.demo_model.vocabulary import COLORS, DAYS, ITEMS, NAMES

FEATURES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "all on": {},
        "no tree": {"enable_prefix_caching": False, "policy": "fcfs", "eviction": "lru"},
        "no cache-aware order": {"policy": "fcfs"},
        "no hints": {"hints": False},
        "no fast-forward": {"fast_forward": "off"},
    }
)
_COMMON: Mapping[str, object] = MappingProxyType(
    {
        "dtype": "float32",
        "speculation": "off",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 1024,
        "memory": "27MiB",
        "policy": "cache-aware",
        "eviction": "cost",
    }
)
_RULES = "Answer what is asked about the story, and nothing else. " * 4
_RECORD = r'\{"name": "[A-Z][a-z]{1,11}", "item": "[a-z ]{1,16}"\}'
_KEYS = ("count", "color", "day", "name")


@sgl.function
def _read(s: sgl.ProgramState, sentences: list[str], num_forks: int) -> None:
    s += sgl.system(_RULES)
    s += sgl.user(" ".join(sentences))
    s += sgl.assistant(sgl.gen("heard", max_tokens=8))
    forks = s.fork(num_forks)
    for fork, sentence in zip(forks, sentences, strict=False):
        fork += sgl.user(f"{sentence}\nJSON keys: name, item")
        fork += sgl.assistant(sgl.gen("record", max_tokens=40, regex=_RECORD))
    forks.join()
    s += sgl.user(" ".join(s["record"]))
    s += sgl.assistant(sgl.gen("end", max_tokens=8))


@sgl.function
def _fill(s: sgl.ProgramState, question: str) -> None:
    s += question
    s += '{"count": ' + sgl.gen("count", stop=",", max_tokens=8)
    s += ', "color": "' + sgl.gen("color", stop='"', max_tokens=8)
    s += '", "day": "' + sgl.gen("day", stop='"', max_tokens=8)
    s += '", "name": "' + sgl.gen("name", stop='"', max_tokens=8)


def measure(num_programs: int = 24, num_forks: int = 4, repeats: int = 3) -> list[dict[str, Any]]:
    """A row for each feature that is off. Rounds alternate between features; each engine has a warm-up."""
    rows: dict[str, dict[str, Any]] = {name: {"off": name, "seconds": []} for name in FEATURES}
    for repeat in range(repeats):
        for name, options in FEATURES.items():
            row = rows[name]
            with _engine(options) as backend:
                _read.run_batch(_stories(2, num_forks, 99), temperature=0, backend=backend)
                backend.flush_cache()
                before = replace(backend.stats)
                steps, start = _steps(backend), time.perf_counter()
                _read.run_batch(
                    _stories(num_programs, num_forks, repeat), temperature=0, backend=backend, num_threads=num_programs
                )
                row["seconds"].append(time.perf_counter() - start)
                row["steps"] = _steps(backend) - steps
                prompts = backend.stats.prompt_tokens - before.prompt_tokens
                cached = backend.stats.cached_tokens - before.cached_tokens
                row["prefill_tokens"], row["hit_share"] = prompts - cached, cached / prompts
                row["output_tokens"] = backend.stats.completion_tokens - before.completion_tokens
    full = rows["all on"]["seconds"]
    for row in rows.values():
        row["slower"] = median(b / a for a, b in zip(full, row["seconds"], strict=True))
        row["seconds"] = median(row["seconds"])
    return list(rows.values())


def measure_speculation(count: int = 16) -> list[dict[str, Any]]:
    """Calls and tokens of a program that fills in a form, over the OpenAI route of a server."""
    with served("--dtype", "float32", "--memory", "256MiB") as server:
        rows = []
        for tokens in (None, 64):
            with sgl.OpenAI("quire-demo", base_url=f"{server.url}/v1", is_chat_model=False) as backend:
                program = sgl.function(_fill.func, num_api_spec_tokens=tokens)
                asked = [{"question": _question(story["sentences"][0])} for story in _stories(count, 1, 5)]
                start = time.perf_counter()
                states = program.run_batch(asked, temperature=0, backend=backend)
                stats = backend.stats
                rows.append(
                    {
                        "num_api_spec_tokens": tokens,
                        "calls": stats.num_calls,
                        "prompt_tokens": stats.prompt_tokens,
                        "output_tokens": stats.completion_tokens,
                        "seconds": time.perf_counter() - start,
                        "texts": [state.text() for state in states],
                    }
                )
    same = sum(a == b for a, b in zip(rows[0].pop("texts"), rows[1].pop("texts"), strict=True))
    return [{**row, "same_texts": same} for row in rows]


@contextmanager
def _engine(options: Mapping[str, object]) -> Iterator[EngineBackend]:
    backend = sgl.Engine(**{**_COMMON, **options})  # type: ignore[arg-type]  # one of them is `hints`
    assert isinstance(backend, EngineBackend), "in this process"
    with backend:
        yield backend


def _steps(backend: EngineBackend) -> int:
    return backend.health().stats.num_steps


def _stories(count: int, num_forks: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"sentences": [_sentence(rng) for _ in range(16)], "num_forks": num_forks} for _ in range(count)]


def _question(sentence: str) -> str:
    """A chat up to the answer, in the format of the model's template, because the route takes text."""
    asked = {"role": "user", "content": f"{sentence}\nJSON keys: {', '.join(_KEYS)}"}
    return Tokenizer.from_folder(embedded.folder()).apply_chat_template([asked])


def _sentence(rng: random.Random) -> str:
    return str(
        rng.choice(BORROWINGS).format(
            name=rng.choice(NAMES),
            item=rng.choice(ITEMS),
            color=rng.choice(COLORS),
            count=rng.randint(2, 30),
            day=rng.choice(DAYS),
        )
    )

"""Prefix cache over chats of several turns: the share of prompt tokens that is found, and the time it saves.

All chats have one system prompt. A turn of each chat runs before the next turn of any. The pool holds all chats, or
about half of them.
"""

import time
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.real.model import chat_ids, memory_of_pool, model_file
from benchmarks.real.texts import python_reference
from quire import LLM, SamplingParams

_TOPICS = ("assert", "with", "lambda", "while", "yield", "del", "import", "nonlocal")
_QUESTIONS = (
    "What is this about?",
    "Explain it with an example.",
    "Which mistakes do beginners make here?",
    "Give a shorter answer.",
    "What would you read next?",
    "Thank you. Summarize our talk.",
)
_SYSTEM = "You are a patient teacher of Python. Answer in plain words, and in two sentences.\n\n"
_ANSWER = 32  # tokens
_TOKENS_OF_HALF = 2304
_CONSOLE = Console(stderr=True)


def chats(num_turns: int = len(_QUESTIONS)) -> list[dict[str, Any]]:
    """A row for each kind of cache: the share found in percent, of each turn and of all, and seconds."""
    common: dict[str, Any] = {"model": str(model_file()), "max_model_len": 2048, "speculation": "off"}
    half = memory_of_pool(_TOKENS_OF_HALF, common)
    kinds: dict[str, dict[str, Any]] = {
        "no cache": {"enable_prefix_caching": False},
        "radix, all fit": {},
        "hash, all fit": {"prefix_index": "hash"},
        "radix, half fits": {"memory": half},
        "radix by cost, half fits": {"memory": half, "eviction": "cost"},
    }
    rows = []
    for kind, options in track(kinds.items(), "chats", console=_CONSOLE, transient=True):
        llm = LLM(**{"memory": "2GiB", **common, **options})
        rows.append({"cache": kind, **_run(llm, num_turns)})
        llm.close()
    return rows


def _run(llm: LLM, num_turns: int) -> dict[str, Any]:
    tokenizer = llm.get_tokenizer()
    system = {"role": "system", "content": _SYSTEM + python_reference("objects")[:1000]}
    talks = [[system] for _ in _TOPICS]
    shares: dict[str, float] = {}
    found = total = 0
    began = time.perf_counter()
    for turn in range(num_turns):
        for name, talk in zip(_TOPICS, talks, strict=True):
            text = f"{python_reference(name)[:800]}\n\n" if turn == 0 else ""
            talk.append({"role": "user", "content": text + _QUESTIONS[turn]})
        prompts = [chat_ids(tokenizer, talk) for talk in talks]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=_ANSWER), use_tqdm=False)
        cached, asked = sum(output.num_cached_tokens for output in outputs), sum(map(len, prompts))
        shares[f"turn {turn + 1}, %"] = round(100 * cached / asked, 1)
        found, total = found + cached, total + asked
        for talk, output in zip(talks, outputs, strict=True):
            talk.append({"role": "assistant", "content": output.outputs[0].text})
    seconds = time.perf_counter() - began
    return {
        **shares,
        "all turns, %": round(100 * found / total, 1),
        "prompt tokens": total,
        "seconds": round(seconds, 2),
    }

"""Row C1: JSON records by the embedded model, with fast-forward, token by token, and unconstrained.

The questions are those of the model's task `extract`: a sentence and the keys of a record. The schema has these keys in
that order, with their types. An answer is correct if it equals the record. Constraints have default options.
"""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from quire import LLM, SamplingParams, StructuredOutputsParams
from tools.demo_model.exercises import extract

RECORD = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {
            "customer": {"type": "string", "pattern": "^[A-Z][a-z]{3,8}$"},
            "order_number": {"type": "string", "pattern": "^[0-9]{6}$"},
            "status": {"enum": ["delivered", "on its way", "cancelled by the customer"]},
            "payment_method": {"enum": ["credit card", "bank transfer", "cash on delivery"]},
            "needs_an_answer": {"type": "boolean"},
        },
        "required": ["customer", "order_number", "status", "payment_method", "needs_an_answer"],
        "additionalProperties": False,
    }
)
_TYPES = {"count": {"type": "integer"}}
WAYS = ("unconstrained", "token by token", "fast-forward")
_NUM_FIELDS = 4  # of the records that are measured by white space and by batch
_STYLES = (("{", ":", ",", "}"), ("{", ": ", ", ", "}"), ("{\n  ", ": ", ",\n  ", "\n}"))  # what models write
_OPTIONS = {"dtype": "float32", "memory": "512MiB", "max_num_seqs": 32, "speculation": "off"}


def questions(count: int, seed: int) -> list[tuple[list[dict[str, str]], dict[str, Any]]]:
    """Conversations that end with a question, and the record that is its answer."""
    rng = random.Random(seed)
    asked = []
    for _ in range(count):
        messages = extract(rng).messages
        asked.append(([dict(message) for message in messages[:-1]], json.loads(messages[-1]["content"])))
    return asked


def form(record: dict[str, Any], *, fast_forward: bool, free: bool = False) -> StructuredOutputsParams:
    """The constraint that follows from the question, without the answer. free: white space is of the model's choice."""
    schema = {
        "type": "object",
        "properties": {key: _TYPES.get(key, {"type": "string"}) for key in record},
        "required": list(record),
        "additionalProperties": False,
    }
    return StructuredOutputsParams(
        json=schema, disable_any_whitespace=False if free else None, fast_forward=fast_forward
    )


def _chosen_once(record: dict[str, Any], *, fast_forward: bool) -> StructuredOutputsParams:
    """The same constraint with white space in one of _STYLES, which the model's first choice decides."""
    styles = []
    for opening, colon, comma, closing in _STYLES:
        heads = [json.dumps((comma if i else opening) + json.dumps(key) + colon) for i, key in enumerate(record)]
        styles.append(" ".join(f"{head} v{i}" for i, head in enumerate(heads)) + f" {json.dumps(closing)}")
    values = [f"v{i}: %json {json.dumps(_TYPES.get(key, {'type': 'string'}))}" for i, key in enumerate(record)]
    return StructuredOutputsParams(
        grammar="\n".join([f"start: {' | '.join(styles)}", *values]), fast_forward=fast_forward
    )


WHITE_SPACE = {"free": partial(form, free=True), "chosen once": _chosen_once, "as json.dumps (default)": form}


def _questions_of_four(count: int, seed: int) -> list[tuple[list[dict[str, str]], dict[str, Any]]]:
    return [one for one in questions(8 * count, seed) if len(one[1]) == _NUM_FIELDS][:count]


def measure_white_space(count: int = 16, seed: int = 1, **options: object) -> list[dict[str, Any]]:
    """Model steps of records of four fields by white space, one record after another and all at once.

    options: of the engine, in place of those for the embedded model.
    """
    llm = LLM(**{**_OPTIONS, **options})
    asked = _questions_of_four(count, seed)
    rows = []
    for name, constraint in WHITE_SPACE.items():
        row: dict[str, Any] = {"white space": name}
        for way in WAYS[1:]:
            params = [
                SamplingParams(
                    temperature=0,
                    max_tokens=96,
                    structured_outputs=constraint(record, fast_forward=way == "fast-forward"),
                )
                for _, record in asked
            ]
            texts = []
            row[f"{way}: steps"] = -llm.get_metrics().num_steps
            for (messages, _), one in zip(asked, params, strict=True):
                texts.append(llm.chat(messages, one, use_tqdm=False)[0].outputs[0].text)
            row[f"{way}: steps"] += llm.get_metrics().num_steps
            row[f"{way}: steps at once"] = -llm.get_metrics().num_steps
            llm.chat([messages for messages, _ in asked], params, use_tqdm=False)
            row[f"{way}: steps at once"] += llm.get_metrics().num_steps
            pairs = [(text, record) for text, (_, record) in zip(texts, asked, strict=True)]
            row[f"{way}: valid"] = sum(_keys(text) == list(record) for text, record in pairs)
            row[f"{way}: right"] = sum(_is(text, record) for text, record in pairs)
        for steps in ("steps", "steps at once"):
            row[f"ratio of {steps}"] = row[f"fast-forward: {steps}"] / row[f"token by token: {steps}"]
        rows.append(row)
    llm.close()
    return rows


def measure_batches(batches: Sequence[int] = (1, 16, 32), repeats: int = 5, seed: int = 1) -> list[dict[str, Any]]:
    """Seconds of records of four fields by batch, with fast-forward and token by token, in turns. Batch 1: 16 alone."""
    llm = LLM(**_OPTIONS)
    rows = []
    for batch in batches:
        asked = _questions_of_four(max(batch, 16), seed)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
        for repeat in range(repeats + 1):  # the first is a warm-up
            for way in WAYS[1:]:
                params = [_params(record, way) for _, record in asked]
                start = time.perf_counter()
                for first in range(0, len(asked), batch):
                    conversations = [messages for messages, _ in asked[first : first + batch]]
                    llm.chat(conversations, params[first : first + batch], use_tqdm=False)
                if repeat:
                    seconds[way].append(time.perf_counter() - start)
        ratios = [a / b for a, b in zip(seconds["fast-forward"], seconds["token by token"], strict=True)]
        rows.append({"batch": batch, **{way: median(one) for way, one in seconds.items()}, "ratio": median(ratios)})
    llm.close()
    return rows


def measure(backend: str, count: int = 64, repeats: int = 3, seed: int = 1, **options: object) -> dict[str, Any]:
    """Steps, seconds, tokens, correct answers and equal answers of each mode. The modes take turns.

    options: of the engine, in place of those for the embedded model.
    """
    own = {"dtype": "float32", "memory": "512MiB", "max_num_seqs": 16, "speculation": "off"}
    llm = LLM(**{**own, "grammar_backend": backend, "seed": seed, **options})
    asked = questions(count, seed)
    conversations = [messages for messages, _ in asked]
    rows: dict[str, Any] = {}
    texts: dict[str, list[str]] = {}
    for repeat in range(repeats + 1):  # the first is a warm-up: afterwards all modes find the prompts cached
        for way in WAYS:
            params = [_params(record, way) for _, record in asked]
            steps, start = llm.get_metrics().num_steps, time.perf_counter()
            outputs = llm.chat(conversations, params, use_tqdm=False)
            seconds, steps = time.perf_counter() - start, llm.get_metrics().num_steps - steps
            texts[way] = [output.outputs[0].text for output in outputs]
            if repeat:
                row = rows.setdefault(way, {"seconds": []})
                row["seconds"].append(seconds)
                row["steps"] = steps
                row["tokens"] = sum(len(output.outputs[0].token_ids) for output in outputs)
                row["forced"] = sum(output.outputs[0].num_forced_tokens for output in outputs)
                row["right"] = sum(_is(text, record) for text, (_, record) in zip(texts[way], asked, strict=True))
                row["valid"] = sum(
                    _keys(text) == list(record) for text, (_, record) in zip(texts[way], asked, strict=True)
                )
    alone = _alone(llm, asked[: count // 4])
    same = sum(a == b for a, b in zip(texts["token by token"], texts["fast-forward"], strict=True))
    llm.close()
    return {"questions": count, "ways": rows, "same_text": same, "steps_alone": alone}


def measure_shape(
    folder: Path, backend: str, batches: tuple[int, ...] = (1, 32), repeats: int = 5
) -> list[dict[str, Any]]:
    """Time and steps of records on random weights, token by token and with fast-forward, in turns."""
    options = {
        "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
        "speculation": "off",
    }  # the second mode would find the prompts
    llm = LLM(str(folder), dtype="bfloat16", memory="4GiB", grammar_backend=backend, **options)
    rows = []
    for batch in batches:
        prompts = [{"prompt_token_ids": [1000 + 7 * i + 31 * j for j in range(64)]} for i in range(batch)]
        seconds: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
        row: dict[str, Any] = {"batch": batch}
        for repeat in range(repeats + 1):
            for way in WAYS[1:]:
                form = replace(RECORD, fast_forward=way == "fast-forward")
                params = SamplingParams(temperature=1, seed=repeat, max_tokens=200, structured_outputs=form)
                steps, start = llm.get_metrics().num_steps, time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds[way].append(time.perf_counter() - start)
                row[f"{way}: steps"] = llm.get_metrics().num_steps - steps
                row[f"{way}: tokens"] = sum(len(output.outputs[0].token_ids) for output in outputs)
        ratios = [a / b for a, b in zip(*(one[1:] for one in seconds.values()), strict=True)]
        rows.append(
            {**row, **{f"{way}: seconds": median(one[1:]) for way, one in seconds.items()}, "speedup": median(ratios)}
        )
    llm.close()
    return rows


def _alone(llm: LLM, asked: list[tuple[list[dict[str, str]], dict[str, Any]]]) -> dict[str, int]:
    """Steps of questions that run one after another, as for a single user."""
    steps = {}
    for way in WAYS:
        before = llm.get_metrics().num_steps
        for messages, record in asked:
            llm.chat(messages, _params(record, way), use_tqdm=False)
        steps[way] = llm.get_metrics().num_steps - before
    return steps


def _params(record: dict[str, Any], way: str) -> SamplingParams:
    asked = None if way == "unconstrained" else form(record, fast_forward=way == "fast-forward")
    return SamplingParams(temperature=0, max_tokens=96, structured_outputs=asked)


def _keys(text: str) -> list[str] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return list(record) if isinstance(record, dict) else None


def _is(text: str, record: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(text) == record)
    except ValueError:
        return False

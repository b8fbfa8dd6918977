"""Public collections of JSON schemas: which schemas are accepted, and which instances the grammars accept.

Each suite is a checkout that lies anywhere on the machine. Its layout tells which one it is: JSON-Schema-Test-Suite,
jsonschemabench, SchemaStore. Nothing is downloaded. An instance is written by json.dumps with its default separators,
without escapes of characters above ASCII, and the matcher of the compiled grammar gets its bytes one by one.
"""

import json
import multiprocessing
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
from rich.progress import track

from quire.core.constraint import Grammar
from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.backends import compile as compile_grammar
from quire.structured_outputs.grammar_cache import STACK_BYTES
from quire.structured_outputs.vocabulary import Vocabulary

SECONDS_PER_SCHEMA = 5.0
MAX_PROCESSES = 2
_MAX_LISTED = 10
_CHUNK = 128  # bytes between two masks: only masks grant lexer fuel
_END = 256
_BYTES = Vocabulary(
    [*(bytes([i]) for i in range(256)), b""], (_END,), frozenset({_END}), lambda text: list(text.encode())
)
# Drafts that quire reads. The suite's draft 3 has other keywords.
_DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")


class Case(NamedTuple):
    """A schema with instances, as (name, value, whether it is valid)."""

    name: str
    schema: object
    instances: tuple[tuple[str, object, bool], ...]


def measure(folders: Sequence[Path], backend: str, *, limit: int | None, processes: int) -> dict[str, Any]:
    """Results by suite. limit: schemas per suite, drawn at random with a fixed seed. Raises ValueError."""
    found = {}
    for folder in folders:
        name, sources, read = _suite(folder)
        if limit is not None and limit < len(sources):
            sources = [sources[place] for place in sorted(random.Random(0).sample(range(len(sources)), limit))]
        results = track(_results(map(read, sources), backend, processes), name, total=len(sources))
        found[name] = _summary(list(results))
    return found


def _suite(folder: Path) -> tuple[str, Sequence[Any], Callable[[Any], Case]]:
    """Its name, what each schema is read from, and the function that reads it."""
    if (tests := folder / "tests" / _DRAFTS[0]).is_dir():
        return "JSON-Schema-Test-Suite", list(_test_suite(tests.parent)), lambda case: case
    if (data := folder / "maskbench" / "data").is_dir():
        return "jsonschemabench", sorted(data.glob("*.json")), _bench_case
    if (source := folder / "src" / "schemas" / "json").is_dir():
        return "SchemaStore", sorted(source.glob("*.json")), lambda path: _store_case(path, folder / "src")
    raise ValueError(f"{folder} has the layout of no known suite: JSON-Schema-Test-Suite, jsonschemabench, SchemaStore")


def _test_suite(tests: Path) -> Iterator[Case]:
    for draft in _DRAFTS:
        for path in sorted((tests / draft).rglob("*.json")):
            for group in json.loads(path.read_text()):
                name = f"{path.relative_to(tests)}: {group['description']}"
                instances = ((test["description"], test["data"], test["valid"]) for test in group["tests"])
                yield Case(name, group["schema"], tuple(instances))


def _bench_case(path: Path) -> Case:
    value = json.loads(path.read_text())
    tests = enumerate(value["tests"])
    return Case(path.stem, value["schema"], tuple((str(i), test["data"], test["valid"]) for i, test in tests))


def _store_case(path: Path, source: Path) -> Case:
    """Instances in YAML and TOML are left out: they have values that JSON does not have."""
    instances = []
    for folder, is_valid in (("test", True), ("negative_test", False)):
        for one in sorted((source / folder / path.stem).glob("*.json")):
            with suppress(ValueError):
                instances.append((one.name, json.loads(one.read_text()), is_valid))
    try:
        schema = json.loads(path.read_text())
    except ValueError:
        schema = path.read_text()  # refused by name, as the server would
    return Case(path.stem, schema, tuple(instances))


def _results(waiting: Iterator[Case], backend: str, processes: int) -> Iterator[dict[str, Any]]:
    """The result of each case, as they come. A case that takes too long or ends its process is a result, too."""
    workers = [worker for _ in range(min(processes, MAX_PROCESSES)) if (worker := _start(waiting, backend)) is not None]
    while workers:
        ready = wait([worker.connection for worker in workers], timeout=0.2)
        for place, worker in enumerate(workers):
            late = time.monotonic() - worker.started_at > SECONDS_PER_SCHEMA
            if worker.connection not in ready and not late:
                continue
            try:
                if worker.connection not in ready:
                    raise EOFError
                result = worker.connection.recv()
                following = _next(worker, waiting)
            except EOFError:
                why = "more than the time limit" if late else "the process ended"
                result = {"name": worker.case.name, "refused": why, "seconds": time.monotonic() - worker.started_at}
                worker.process.kill()
                following = _start(waiting, backend)
            workers[place] = following  # type: ignore[call-overload]  # None is removed below
            yield {"instances": [], **result}
        workers = [worker for worker in workers if worker is not None]


class _Worker(NamedTuple):
    process: multiprocessing.process.BaseProcess
    connection: Connection
    case: Case
    started_at: float


def _start(waiting: Iterator[Case], backend: str) -> _Worker | None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(there, backend), daemon=True)
    process.start()
    there.close()
    here.recv()  # it has imported everything
    return _next(_Worker(process, here, Case("", {}, ()), 0), waiting)


def _next(worker: _Worker, waiting: Iterator[Case]) -> _Worker | None:
    case = next(waiting, None)
    worker.connection.send(case)
    return None if case is None else worker._replace(case=case, started_at=time.monotonic())


def _work(connection: Connection, backend: str) -> None:
    """Answer cases until None comes, on a thread with the stack of the server's threads."""

    def loop() -> None:
        connection.send(None)
        while (case := connection.recv()) is not None:
            connection.send(_result(case, backend))

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


def _result(case: Case, backend: str) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        params = StructuredOutputsParams(json=json.dumps(case.schema) if case.schema is not True else "true")
        grammar = compile_grammar(params, _BYTES, backend)
    except RequestError as error:
        return {"name": case.name, "refused": str(error), "seconds": time.perf_counter() - start}
    compiled = time.perf_counter() - start
    instances = [
        (name, is_valid, *_verdict(grammar, case.schema, value, is_valid)) for name, value, is_valid in case.instances
    ]
    return {
        "name": case.name,
        "refused": "",
        "compile_seconds": compiled,
        "instances": instances,
        "seconds": time.perf_counter() - start,
    }


def _verdict(grammar: Grammar, schema: object, value: object, is_valid: bool) -> tuple[bool, str]:  # noqa: FBT001
    """(whether the grammar accepts the value, why it does so although it should not)."""
    text = _dumps(value)
    num_bytes = _num_accepted(grammar, text)
    accepts = num_bytes is None
    if accepts == is_valid:
        return accepts, ""
    if accepts:
        return True, _why_accepted(schema, value)
    return False, _why_rejected(grammar, schema, value, text[max(0, num_bytes - 30) : num_bytes + 10])


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _num_accepted(grammar: Grammar, text: str) -> int | None:
    """None if the text is complete; otherwise the number of its first bytes that the grammar accepts, in chunks."""
    matcher = grammar.new_matcher(fast_forward=False)
    tokens = [*text.encode(errors="surrogatepass"), _END]
    words = np.zeros(_BYTES.num_words, np.uint32)
    for first in range(0, len(tokens), _CHUNK):
        chunk = tokens[first : first + _CHUNK]
        if matcher.advance(chunk).error:
            return first + _num_taken(grammar, tokens[: first + _CHUNK], first)
        matcher.fill_bitmask(words)
    return None


def _num_taken(grammar: Grammar, tokens: list[int], first: int) -> int:
    """How many tokens behind `first` the grammar accepts."""
    low, high = first, len(tokens)  # accepted, not accepted
    while high - low > 1:
        middle = (low + high) // 2
        matcher = grammar.new_matcher(fast_forward=False)
        low, high = (low, middle) if matcher.advance(tokens[:middle]).error else (middle, high)
    return low - first


_ANNOTATIONS = (
    "format",
    "contentMediaType",
    "contentEncoding",
)  # docs/structured.md has a table of the unenforced ones


def _why_accepted(schema: object, value: object) -> str:
    """ "annotation" if a validator for which these keywords are annotations accepts the value, too; else "wrong"."""
    try:
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        is_valid = validator(schema).is_valid(value)
    except Exception:  # any fault of the validator or the schema: listed, to be looked at
        return "wrong"
    written = json.dumps(schema)
    return "annotation" if is_valid and any(f'"{keyword}"' in written for keyword in _ANNOTATIONS) else "wrong"


def _why_rejected(grammar: Grammar, schema: object, value: object, near: str) -> str:
    order = list(_orders(schema))
    for why, other in (
        ("order of properties", _sorted(value, order)),
        ("form of a number", _with_plain_numbers(value)),
        ("order of properties and form of a number", _with_plain_numbers(_sorted(value, order))),
    ):
        if _num_accepted(grammar, _dumps(other)) is None:
            return why
    if re.search(r"\\u00|\x7f", _dumps(value)):
        return "control characters"
    return f"other: {near!r}"


def _orders(schema: object) -> Iterator[dict[str, int]]:
    """The places of names, of each `properties` in the schema."""
    if isinstance(schema, dict):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            yield {name: place for place, name in enumerate(properties)}
        for one in schema.values():
            yield from _orders(one)
    elif isinstance(schema, list):
        for one in schema:
            yield from _orders(one)


def _sorted(value: object, orders: Sequence[dict[str, int]]) -> object:
    """The value with each object in the order of the `properties` that have most of its names; others come last."""
    if isinstance(value, dict):
        order: dict[str, int] = max(orders, key=lambda one: len(one.keys() & value.keys()), default={})
        names = sorted(value, key=lambda name: order.get(name, len(order)))
        return {name: _sorted(value[name], orders) for name in names}
    return [_sorted(one, orders) for one in value] if isinstance(value, list) else value


def _with_plain_numbers(value: object) -> object:
    if isinstance(value, dict):
        return {name: _with_plain_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_plain_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def reason(message: str) -> str:
    """A refusal without what belongs to one schema: its last keyword, and the beginning of the sentence."""
    place, _, why = (
        message.removeprefix("schema at ").partition(": ") if message.startswith("schema at ") else ("", "", message)
    )
    keyword = place.rpartition("/")[2]
    keyword = keyword if re.fullmatch(r"\$?[a-z]+[a-zA-Z]*", keyword) else ""
    why = re.sub(r"'[^']*'|\"[^\"]*\"|/.*/|[0-9][0-9,.]*", "_", why)
    return f"{keyword}: {why[:70]}" if keyword else why[:70]


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    accepted = [one for one in results if not one["refused"]]
    instances = [(one["name"], *instance) for one in accepted for instance in one["instances"]]
    rejected = [(name, at, why) for name, at, is_valid, accepts, why in instances if is_valid and not accepts]
    wrong = [(name, at, why) for name, at, is_valid, accepts, why in instances if not is_valid and accepts]
    slowest = sorted(results, key=lambda one: -one["seconds"])[:_MAX_LISTED]
    refused = [one for one in results if one["refused"]]
    return {
        "schemas": len(results),
        "accepted": len(accepted),
        "accepted_share": round(len(accepted) / max(1, len(results)), 4),
        "refused_by_reason": _counted(reason(one["refused"]) for one in refused),
        "refused_without_place": sum(not one["refused"].startswith("schema at ") for one in refused),
        "refused": {one["name"]: one["refused"] for one in refused},
        "valid_instances": sum(is_valid for _, _, is_valid, _, _ in instances),
        "valid_rejected": len(rejected),
        "valid_rejected_by_reason": _counted(why.partition(":")[0] for _, _, why in rejected),
        "valid_rejected_otherwise": [one for one in rejected if one[2].startswith("other")],
        "invalid_instances": sum(not is_valid for _, _, is_valid, _, _ in instances),
        "invalid_accepted_by_annotation": [f"{name}, {at}" for name, at, why in wrong if why == "annotation"],
        "invalid_accepted": [f"{name}, {at}" for name, at, why in wrong if why == "wrong"],
        "slowest": [(one["name"], round(one["seconds"], 3)) for one in slowest],
        "seconds": round(sum(one["seconds"] for one in results), 1),
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def tables(found: dict[str, Any]) -> list[str]:
    """The results as text."""
    names = ("schemas", "accepted", "accepted_share", "refused_without_place", "valid_instances", "valid_rejected")
    rows = [
        (
            suite,
            *(one[name] for name in names),
            one["invalid_instances"],
            *(len(one[f"invalid_accepted{end}"]) for end in ("", "_by_annotation")),
        )
        for suite, one in found.items()
    ]
    heads = ("suite", *names, "invalid_instances", "invalid_accepted", "by an annotation")
    parts = ["\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows))]
    for suite, one in found.items():
        lines = [f"{suite}: refused schemas by reason"]
        lines += [f"{count:6} {why}" for why, count in list(one["refused_by_reason"].items())[:40]]
        lines += ["valid instances rejected by reason"]
        lines += [f"{count:6} {why}" for why, count in one["valid_rejected_by_reason"].items()]
        lines += [f"invalid instance accepted: {name}" for name in one["invalid_accepted"]]
        lines += [f"slowest: {name}, {seconds} s" for name, seconds in one["slowest"]]
        parts.append("\n".join(lines))
    return parts

"""Random constraints whose outputs have a longest text: patterns with lengths, alone, in objects and in arrays.

The patterns have one meaning in Rust, JavaScript and Python over the texts that quire generates.
"""

import json
import random
import re

import jsonschema_rs

from quire.params import StructuredOutputsParams

_SETS = (
    "[a-z]",
    "[A-Z]",
    "[ab]",
    "[^,]",
    "[^a-m]",
    "[^ \\t\\n]",
    "[0-9a-f]",
    "[ж-я]",
    ".",
    "a",
    "x",
    "é",
    "-",
    ",",
    " ",
)
_CLASSES = (*_SETS, r"\S", r"\s", r"\w", r"\W", r"\d", r"\S", r"\s")  # Unicode's versions differ in a `regex`
_FORMATS = ("date-time", "email", "uri", "hostname", "ipv6", "duration")
_TIMES = (1, 2, 3, 5, 9, 20, 39, 60)
_LENGTHS = (0, 1, 3, 10, 40, 100, 250, 400, 1000)
_REFUSED = re.compile(r"cannot be enforced: patterns|no value satisfies the schema|too complex|too large")


def constraint_at_random(rng: random.Random) -> StructuredOutputsParams:
    """A pattern or a schema of strings."""
    kind = rng.random()
    if kind < 0.2:
        return StructuredOutputsParams(regex=_bounded(rng, 3, 400, _SETS))
    if kind < 0.7:
        schema = _string(rng)
    elif kind < 0.85:
        names = ["name", "text", "id"][: rng.randint(1, 3)]
        schema = {
            "type": "object",
            "properties": {name: _string(rng) for name in names},
            "required": names,
            "additionalProperties": False,
        }
    else:
        schema = {"type": "array", "items": _string(rng), "minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 4)}
    return StructuredOutputsParams(json=json.dumps(schema))


def is_valid(asked: StructuredOutputsParams, data: bytes) -> bool:
    """Whether a complete output satisfies a constraint of `constraint_at_random`."""
    if asked.kind == "regex":
        schema, value = {"pattern": rf"\A(?:{asked.text})\z"}, data.decode()
    else:
        schema, value = json.loads(asked.text), json.loads(data)
    options = jsonschema_rs.RegexOptions(size_limit=1 << 30)  # of linear time: `re` backtracks without end
    return jsonschema_rs.validator_for(schema, pattern_options=options, validate_formats=True).is_valid(value)


def _string(rng: random.Random) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    kind = rng.random()
    if kind < 0.12:
        return {"anyOf": [_string(rng), _string(rng)]}
    if kind < 0.18:
        return {**schema, "format": rng.choice(_FORMATS), "maxLength": rng.choice(_LENGTHS[4:])}
    if kind > 0.22:
        pattern = _pattern(rng)
        schema["pattern"] = rng.choice(("^(?:{})$", "^(?:{})$", "^(?:{})", "{}")).replace("{}", pattern)
    if kind > 0.9:
        schema["allOf"] = [{"pattern": f"^(?:{_pattern(rng)})$"}]
    schema["maxLength"] = rng.choice(_LENGTHS)
    if rng.random() < 0.3:
        schema["minLength"] = rng.randint(0, rng.choice((1, 10, 400)))
    return schema


def _pattern(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return _bounded(rng, 3, 400, _CLASSES)
    return _separated(rng) if kind < 0.6 else _unbounded(rng, 3)


def _separated(rng: random.Random) -> str:
    """A number of words with separators, such as (?:\\S+\\s+){0,39}\\S+."""
    word, separator = rng.choice(_CLASSES), rng.choice(_CLASSES)
    item = f"{word}{rng.choice('+*?')}{separator}{rng.choice(('', '+', '{1,3}'))}"
    most = rng.choice(_TIMES)
    return f"(?:{item}){{{rng.randint(0, most)},{most}}}{word}{rng.choice(('+', '*', ''))}"


def _unbounded(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.25:
        return rng.choice(_CLASSES)
    if kind < 0.45:
        return "".join(_unbounded(rng, depth - 1) for _ in range(rng.randint(2, 3)))
    if kind < 0.6:
        return f"(?:{'|'.join(_unbounded(rng, depth - 1) for _ in range(rng.randint(2, 3)))})"
    most = rng.choice(_TIMES)
    counted = f"{{{rng.randint(0, most)},{most}}}"
    return f"(?:{_unbounded(rng, depth - 1)}){rng.choice(('*', '+', '?', counted, counted, f'{{{most}}}'))}"


def _bounded(rng: random.Random, depth: int, most: int, classes: tuple[str, ...]) -> str:
    """A pattern of texts of at most about `most` characters."""
    kind = rng.random()
    if depth == 0 or most < 2 or kind < 0.15:
        return rng.choice(classes)
    if kind < 0.4:
        num = rng.randint(2, 3)
        return "".join(_bounded(rng, depth - 1, most // num, classes) for _ in range(num))
    if kind < 0.55:
        return f"(?:{'|'.join(_bounded(rng, depth - 1, most, classes) for _ in range(rng.randint(2, 3)))})"
    times = rng.randint(1, most)
    return f"(?:{_bounded(rng, depth - 1, most // times, classes)}){{{rng.randint(0, times)},{times}}}"

"""Keywords of JSON schema whose arguments are values and not schemas."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from quire.errors import RequestError, nearest
from quire.params import MAX_LITERAL
from quire.structured_outputs.json_schema.bounds import MAX_NODES, TYPES

# RFC 3339, with real calendar days: the 29th of February only in leap years; no year 0000.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOURS = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOURS}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_HOURS})"

# RFC 3339, appendix A: units in order, without gaps.
_N = "[0-9]{1,6}"
_TIME_OF_DURATION = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DATE_OF_DURATION = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = f"P(?:{_N}W|{_DATE_OF_DURATION}(?:{_TIME_OF_DURATION})?|{_TIME_OF_DURATION})"

# RFC 1123: at most 63 characters between dots and 253 in all. The last label begins with a letter: it is no address.
_LONG_LABEL = "[a-zA-Z0-9]{1,15}(?:-[a-zA-Z0-9]{1,15}){0,3}"
_SHORT_LABEL = "[a-zA-Z0-9]{1,10}(?:-[a-zA-Z0-9]{1,10})?"
_LAST_LABEL = "[a-zA-Z]{1,15}(?:-[a-zA-Z0-9]{1,15}){0,3}"
_HOSTNAME = f"(?:(?:{_LONG_LABEL}\\.){{0,2}}|(?:{_SHORT_LABEL}\\.){{3,8}}){_LAST_LABEL}"

# RFC 5321, 4.1.2: a dot-string of at most 64 characters at a host.
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL = f"{_ATOM}(?:\\.{_ATOM}){{0,2}}@{_HOSTNAME}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_BYTE}\\.){{3}}{_BYTE}"

# RFC 4291: eight groups, or up to seven and a "::".
_GROUP = "[0-9a-fA-F]{1,4}"


def _with_gap(left: int) -> str:
    before = f"{_GROUP}(?::{_GROUP}){{{left - 1}}}" if left else ""
    return f"{before}::" + (f"(?:{_GROUP}(?::{_GROUP}){{0,{6 - left}}})?" if left < 7 else "")


_IPV6 = "(?:" + "|".join([f"(?:{_GROUP}:){{7}}{_GROUP}", *map(_with_gap, range(8))]) + ")"

_UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

# RFC 3986, common forms only: //authority/path or a path, then a query and a fragment.
_CHARACTER = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_HOST = f"(?:\\[{_IPV6}\\]|(?:[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{{2}}){{0,253}})"
_USER = "(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|%[0-9a-fA-F]{2}){1,64}"
_AUTHORITY = f"(?:{_USER}@)?{_HOST}(?::[0-9]{{1,5}})?"
_TAIL = f"(?:{_CHARACTER}|[/?])*"
_PATH = f"(?://{_AUTHORITY}(?:/{_CHARACTER}*)*|/?{_CHARACTER}+(?:/{_CHARACTER}*)*)"
_URI = f"[a-zA-Z][a-zA-Z0-9+.-]{{0,30}}:{_PATH}(?:\\?{_TAIL})?(?:#{_TAIL})?"

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        name: f"^(?:{pattern})$"
        for name, pattern in {
            "date-time": f"{_DATE}T{_TIME}",
            "date": _DATE,
            "time": _TIME,
            "duration": _DURATION,
            "email": _EMAIL,
            "hostname": _HOSTNAME,
            "ipv4": _IPV4,
            "ipv6": _IPV6,
            "uuid": _UUID,
            "uri": _URI,
        }.items()
    }
)


# By letter of the class: characters that both JavaScript (ECMA-262, 12.2, 12.3, 22.2.2.9) and Python count, or either.
_CLASS_INTERSECTION = {
    "s": r"\t\n\x0b\x0c\r\x20\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    "d": "0-9",
    "w": "0-9A-Za-z_",
}
_CLASS_UNION = {"s": _CLASS_INTERSECTION["s"] + r"\x1c-\x1f\u0085\ufeff", "d": r"\p{Nd}", "w": r"\p{L}\p{N}\p{M}\p{Pc}"}
_PATTERN_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f]|\\(?:x(?:[01]|\{)|u(?:00[01]|\{)|U000000[01]|c|[0aebv])")
_PIECE = re.compile(
    r"(?P<set>\[\^?(?:[^\]\\]|\\.)*\])|(?P<property>\\[pP](?:\{[^{}]*\}|.))|(?P<escape>\\.)|(?P<any>\.)|(?P<other>.)",
    re.DOTALL,
)
_WHOLE_SETS = {"[]", "[^]"}  # no character and any character, in JavaScript only


def strict_pattern(pattern: str) -> str:
    """The pattern, narrowed to what both JavaScript and Python match. Raises ValueError if a part is unsupported."""
    if re.search(r"\\b", pattern):
        raise ValueError("\\b is not supported")
    if _PATTERN_CONTROL.search(pattern):
        raise ValueError("control characters other than \\t, \\n, \\r and \\f cannot be named")
    return "".join(map(_rewritten, _PIECE.finditer(pattern)))


def _rewritten(piece: re.Match[str]) -> str:
    written = piece[0]
    match piece.lastgroup:
        case "set":
            if written in _WHOLE_SETS or "--" in written:
                raise ValueError(f"the set {written!r:.50} is not supported")
            return _without_control(_set(written))
        case "property":
            return _without_control(written)
        case "any":
            return _without_control(r"[^\n\r\u2028\u2029]")
        case "escape":
            return _class(written)
    return written


def _set(written: str) -> str:
    """The set with "[", "&" and "~" escaped: in JavaScript they are plain characters in a set."""
    opening = "[^" if written.startswith("[^") else "["
    inner = re.findall(r"\\.|.", written[len(opening) : -1], re.DOTALL)
    is_negated = opening == "[^"
    return opening + "".join(f"\\{one}" if one in "[&~" else _class(one, is_negated=is_negated) for one in inner) + "]"


def _class(escape: str, *, is_negated: bool = False) -> str:
    """The set of a class escape such as \\d; another escape unchanged. is_negated: it stands in a negated set."""
    letter = escape[1:]
    if letter in _CLASS_INTERSECTION:
        return f"[{(_CLASS_UNION if is_negated else _CLASS_INTERSECTION)[letter]}]"
    if letter.lower() in _CLASS_INTERSECTION and len(escape) == 2:
        return f"[^{(_CLASS_INTERSECTION if is_negated else _CLASS_UNION)[letter.lower()]}]"
    return escape


def _without_control(one: str) -> str:
    return rf"[{one}&&[^\x01]]"


MAX_PROPERTIES = 512  # of one object
_MAX_WHOLE = 2**53  # larger integers are not exact as floats
_MIN_FRACTION = 1e-9
_MAX_AMOUNT = 2**31 - 1
_MAX_PATTERNS = 8192  # characters of all patterns
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")  # characters that JSON can write as \u escapes only

Out = dict[str, object]


class Values:
    """Checks values and counts nodes and characters of patterns. at: JSON pointer of a value, for errors."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._num_nodes = 0
        self._num_characters = 0

    def error(self, at: str, why: str) -> RequestError:
        """The error of a value. The caller raises it."""
        return RequestError(f"schema at {at}: {why}", self._param)

    def count_node(self, at: str) -> None:
        """Count a schema, or a value within a constant. Raises RequestError beyond MAX_NODES."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise self.error(at, f"more than {MAX_NODES:,} parts; make the schema smaller")

    def read(self, key: str, argument: object, at: str, out: Out) -> None:
        """Translate one keyword of VALUES into the schema `out`. Raises RequestError."""
        VALUES[key](self, key, argument, at, out)

    def pattern(self, pattern: object, at: str) -> str:
        """A pattern in the syntax of the backends. Raises RequestError."""
        if not isinstance(pattern, str):
            raise self.error(at, "a pattern is a string")
        self._num_characters += len(pattern)
        if self._num_characters > _MAX_PATTERNS:
            raise self.error(at, f"more than {_MAX_PATTERNS:,} characters of patterns")
        try:
            return strict_pattern(pattern)
        except ValueError as error:
            raise self.error(at, f"pattern: {error}") from error

    def check_text(self, text: str, at: str) -> None:
        """Raises RequestError for a name or constant that is too long or has control characters."""
        if len(text) > MAX_LITERAL:
            raise self.error(at, f"a text must have at most {MAX_LITERAL:,} characters, not {len(text):,}")
        if _CONTROL.search(text):
            raise self.error(at, "control characters other than \\b, \\f, \\n, \\r and \\t are not supported")

    def _pattern(self, key: str, argument: object, at: str, out: Out) -> None:
        out[key] = self.pattern(argument, at)

    def _format(self, key: str, argument: object, at: str, out: Out) -> None:
        if not isinstance(argument, str) or argument not in FORMATS:
            known = ", ".join(sorted(FORMATS))
            raise self.error(at, f"format {argument!r:.100} is not enforced; leave it out, or use one of {known}")
        out[key] = FORMATS[argument]

    def _types(self, key: str, argument: object, at: str, out: Out) -> None:
        names = [argument] if isinstance(argument, str) else argument
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise self.error(at, "type is a name or a list of names")
        for name in names:
            if name not in TYPES:
                raise self.error(at, f"unknown type {name!r:.100}{nearest(name, sorted(TYPES))}")
        out[key] = names[0] if len(names) == 1 else names

    def _const(self, key: str, argument: object, at: str, out: Out) -> None:
        self._constant(argument, at)
        out[key] = argument

    def _enum(self, key: str, argument: object, at: str, out: Out) -> None:
        if not isinstance(argument, list) or not argument:
            raise self.error(at, "enum is a list of values, at least one")
        for index, one in enumerate(argument):
            self._constant(one, f"{at}/{index}")
        out[key] = argument

    def _constant(self, value: object, at: str) -> None:
        if isinstance(value, str):
            self.check_text(value, at)
        elif isinstance(value, list):
            for index, one in enumerate(value):
                self.count_node(at)
                self._constant(one, f"{at}/{index}")
        elif isinstance(value, dict):
            for name, one in value.items():
                self.count_node(at)
                self.check_text(name, at)
                self._constant(one, f"{at}/{escaped(name)}")
        elif value is not None and not isinstance(value, bool):
            self._number(value, at)

    def _number(self, value: object, at: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(at, "must be a number")
        if not abs(value) <= _MAX_WHOLE:
            raise self.error(at, "numbers beyond 2**53 are not exact; use smaller ones")
        if 0 < abs(value) < _MIN_FRACTION:
            raise self.error(at, f"numbers closer to zero than {_MIN_FRACTION:g} are not enforced")
        return value

    def _bound(self, key: str, argument: object, at: str, out: Out) -> None:
        if not isinstance(argument, bool):
            out[key] = self._number(argument, at)
        elif not key.startswith("exclusive"):
            raise self.error(at, "must be a number")
        elif argument:  # draft 4: the bound of the same side is exclusive
            out[key] = True

    def _multiple(self, key: str, argument: object, at: str, out: Out) -> None:
        if self._number(argument, at) <= 0:
            raise self.error(at, "must be above 0")
        out[key] = argument

    def _amount(self, key: str, argument: object, at: str, out: Out) -> None:
        value = self._number(argument, at)
        if value < 0 or value != int(value):
            raise self.error(at, "must be a whole number, 0 or more")
        if value <= _MAX_AMOUNT:
            out[key] = int(value)
        elif key.startswith("min"):
            raise self.error(at, f"must be at most {_MAX_AMOUNT:,}")

    def _required(self, key: str, argument: object, at: str, out: Out) -> None:
        if not isinstance(argument, list) or not all(isinstance(name, str) for name in argument):
            raise self.error(at, "required is a list of names")
        if len(argument) > MAX_PROPERTIES:
            raise self.error(at, f"more than {MAX_PROPERTIES} names")
        for name in argument:
            self.check_text(name, at)
        out[key] = list(dict.fromkeys(argument))


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


VALUES: Mapping[str, Callable[[Values, str, object, str, Out], None]] = MappingProxyType(
    {
        "type": Values._types,
        "const": Values._const,
        "enum": Values._enum,
        "multipleOf": Values._multiple,
        "pattern": Values._pattern,
        "format": Values._format,
        "required": Values._required,
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), Values._bound),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), Values._amount),
        **dict.fromkeys(("minProperties", "maxProperties"), Values._amount),
    }
)

"""Keywords of JSON schema whose arguments are values and not schemas."""

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from quire.errors import RequestError, nearest
from quire.params import MAX_LITERAL
from quire.structured_outputs.json_schema.bounds import MAX_NODES, TYPES, schema_error
from quire.structured_outputs.json_schema.logic import Part

# RFC 3339, with real calendar days: the 29th of February only in leap years; no year 0000.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOURS = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOURS}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOURS})"

# RFC 3339, appendix A: units in order, without gaps.
_N = "[0-9]{1,6}"
_TIME_OF_DURATION = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DATE_OF_DURATION = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = f"P(?:{_N}W|{_DATE_OF_DURATION}(?:{_TIME_OF_DURATION})?|{_TIME_OF_DURATION})"

# RFC 1123 and 5891: a label has at most 63 characters and no "--" at its third and fourth. A host has at most 253. The
# last label is no number: it has a letter among its first 15 characters.
_LETTER, _DIGIT_OR_LETTER, _ANY_OF_LABEL = "[a-zA-Z]", "[a-zA-Z0-9]", "[a-zA-Z0-9-]"


def _label(most: int, first: str = _DIGIT_OR_LETTER) -> str:
    middle = f"{_ANY_OF_LABEL}(?:{_DIGIT_OR_LETTER}{_ANY_OF_LABEL}|-{_DIGIT_OR_LETTER}){_ANY_OF_LABEL}{{0,{most - 5}}}"
    return f"{first}(?:(?:{_ANY_OF_LABEL}{{0,2}}|{middle}){_DIGIT_OR_LETTER})?"


def _last_label(most: int) -> str:
    after_digits = f"[0-9](?:[0-9]|-[0-9]){{0,7}}{_LETTER}(?:-?{_DIGIT_OR_LETTER}){{0,{(most - 17) // 2}}}"
    return f"(?:{_label(most, _LETTER)}|{after_digits})"


_HOSTNAME = (
    f"(?:(?:{_label(63)}\\.){{0,2}}{_last_label(63)}"
    f"|(?:{_label(63)}\\.)?(?:{_label(30)}\\.){{0,5}}{_last_label(30)}"
    f"|(?:{_label(10)}\\.){{0,18}}{_last_label(30)})"
)

# RFC 5321, 4.1.2: a dot-string of at most 64 characters at a host.
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_LOCAL = (
    f"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,31}}\\.{_ATOM}{{1,32}}"
    f"|{_ATOM}{{1,20}}(?:\\.{_ATOM}{{1,20}}){{2}}|{_ATOM}(?:\\.?{_ATOM}){{0,31}})"
)
_EMAIL = f"{_LOCAL}@{_HOSTNAME}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_BYTE}\\.){{3}}{_BYTE}"

# RFC 4291: eight groups, or up to seven and a "::". The last two groups may be an IPv4 address.
_GROUP = "[0-9a-fA-F]{1,4}"


def _with_gap(left: int) -> str:
    before = f"{_GROUP}(?::{_GROUP}){{{left - 1}}}" if left else ""
    address = f"|(?:{_GROUP}:){{0,{5 - left}}}{_IPV4}" if left < 6 else ""
    return f"{before}::" + (f"(?:{_GROUP}(?::{_GROUP}){{0,{6 - left}}}{address})?" if left < 7 else "")


_WITHOUT_GAP = f"(?:{_GROUP}:){{6}}(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "(?:" + "|".join([_WITHOUT_GAP, *map(_with_gap, range(8))]) + ")"

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
            "date-time": f"{_DATE}[Tt]{_TIME}",
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


_MAX_BOUND = 2**63 - 1024  # of numbers: exact as a float and as a 64-bit integer
INTEGER_FORMATS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
        **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
        "int64": (-_MAX_BOUND, _MAX_BOUND),
        "uint64": (0, _MAX_BOUND),
        "uint": (0, 2**32 - 1),
    }
)
# Formats that are known and not enforced: of numbers, of text that is no regular language, and of OpenAPI.
_UNENFORCED_FORMATS = frozenset(
    {
        *("float", "double", "decimal", "byte", "binary", "password"),
        *("regex", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
        *("iri", "iri-reference", "idn-email", "idn-hostname"),
    }
)


MAX_PROPERTIES = 5000  # of one object
_MAX_WHOLE = 2**53  # larger integers are not exact as floats
_MIN_FRACTION = 1e-9
_MAX_AMOUNT = 2**31 - 1
_MAX_PATTERNS = 8192  # characters of all patterns
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")  # characters that JSON can write as \u escapes only


class Values:
    """Checks values and counts nodes and characters of patterns. at: JSON pointer of a value, for errors."""

    def __init__(self, param: str, *, refuse_unknown: bool = False) -> None:
        self._param = param
        self._refuse_unknown = refuse_unknown
        self._num_nodes = 0
        self._num_characters = 0

    def error(self, at: str, why: str) -> RequestError:
        """The error of a value. The caller raises it."""
        return schema_error(at, why, self._param)

    def count_node(self, at: str) -> None:
        """Count a schema, or a value within a constant. Raises RequestError beyond MAX_NODES."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise self.error(at, f"more than {MAX_NODES:,} parts; make the schema smaller")

    def read(self, key: str, argument: object, at: str, out: Part) -> None:
        """Translate one keyword of VALUES into the schema `out`. Raises RequestError."""
        VALUES[key](self, key, argument, at, out)

    def ignore(self, at: str, why: str) -> None:
        """A keyword or format is an annotation. Raises RequestError if these are refused."""
        if self._refuse_unknown:
            raise self.error(at, why)

    def count_pattern(self, pattern: object, at: str) -> None:
        """Raises RequestError for a pattern that is no string, and if all patterns are too long together."""
        if not isinstance(pattern, str):
            raise self.error(at, "a pattern is a string")
        self._num_characters += len(pattern)
        if self._num_characters > _MAX_PATTERNS:
            raise self.error(at, f"more than {_MAX_PATTERNS:,} characters of patterns")

    def check_text(self, text: str, at: str) -> None:
        """Raises RequestError for a name or constant that is too long or has control characters."""
        if len(text) > MAX_LITERAL:
            raise self.error(at, f"a text must have at most {MAX_LITERAL:,} characters, not {len(text):,}")
        if _CONTROL.search(text):
            raise self.error(at, "control characters other than \\b, \\f, \\n, \\r and \\t are not supported")

    def _pattern(self, key: str, argument: object, at: str, out: Part) -> None:
        self.count_pattern(argument, at)
        out[key] = argument

    def _format(self, key: str, argument: object, at: str, out: Part) -> None:
        if not isinstance(argument, str):
            raise self.error(at, "a format is a string")
        if argument in FORMATS or argument in INTEGER_FORMATS:
            out[key] = argument
        elif argument not in _UNENFORCED_FORMATS:
            self.ignore(at, f"unknown format {argument!r:.100}{nearest(argument, FORMATS)}")

    def _unique(self, key: str, argument: object, at: str, out: Part) -> None:
        if not isinstance(argument, bool):
            raise self.error(at, "must be true or false")
        if argument:
            out[key] = True

    def _types(self, key: str, argument: object, at: str, out: Part) -> None:
        names = [argument] if isinstance(argument, str) else argument
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise self.error(at, "type is a name or a list of names")
        for name in names:
            if name not in TYPES:
                raise self.error(at, f"unknown type {name!r:.100}{nearest(name, sorted(TYPES))}")
        out[key] = names[0] if len(names) == 1 else names

    def _const(self, key: str, argument: object, at: str, out: Part) -> None:
        self._constant(argument, at)
        out[key] = argument

    def _enum(self, key: str, argument: object, at: str, out: Part) -> None:
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

    def _bound(self, key: str, argument: object, at: str, out: Part) -> None:
        if not isinstance(argument, bool):
            out[key] = self._exact_bound(key, argument, at, out)
        elif not key.startswith("exclusive"):
            raise self.error(at, "must be a number")
        elif argument:  # draft 4: the bound of the same side is exclusive
            out[key] = True

    def _exact_bound(self, key: str, argument: object, at: str, out: Part) -> float:
        """A bound that is exact as a float, the nearest one inside of the range."""
        if not isinstance(argument, int | float) or abs(argument) <= _MAX_WHOLE:
            return self._number(argument, at)
        sign = 1 if key.endswith("inimum") else -1
        if sign * argument > _MAX_BOUND or argument != argument:
            raise self.error(at, "no number that large can be enforced; use a smaller one")
        bound = float(max(-_MAX_BOUND, min(_MAX_BOUND, argument)))
        bound = (
            bound
            if sign * int(bound) >= sign * min(_MAX_BOUND, max(-_MAX_BOUND, argument))
            else math.nextafter(bound, sign * math.inf)
        )
        out.is_narrowed |= bound != argument
        return int(bound)

    def _multiple(self, key: str, argument: object, at: str, out: Part) -> None:
        if self._number(argument, at) <= 0:
            raise self.error(at, "must be above 0")
        out[key] = argument

    def _amount(self, key: str, argument: object, at: str, out: Part) -> None:
        value = self._number(argument, at)
        if value < 0 or value != int(value):
            raise self.error(at, "must be a whole number, 0 or more")
        if value <= _MAX_AMOUNT:
            out[key] = int(value)
        elif key.startswith("min"):
            raise self.error(at, f"must be at most {_MAX_AMOUNT:,}")

    def _required(self, key: str, argument: object, at: str, out: Part) -> None:
        if not isinstance(argument, list) or not all(isinstance(name, str) for name in argument):
            raise self.error(at, "required is a list of names")
        if len(argument) > MAX_PROPERTIES:
            raise self.error(at, f"more than {MAX_PROPERTIES:,} names")
        for name in argument:
            self.check_text(name, at)
        out[key] = list(dict.fromkeys(argument))


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


VALUES: Mapping[str, Callable[[Values, str, object, str, Part], None]] = MappingProxyType(
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
        **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), Values._amount),
        "uniqueItems": Values._unique,
    }
)

r"""Patterns of JSON schema, which are JavaScript's, in the syntax of llguidance, which is that of Rust's regex.

Where JavaScript and Python disagree of a class (what is a letter, white space, the end of a line), it becomes what both
say. A set that has all control characters and not the quote or the backslash is quoted wrongly by llguidance 1.9
(`[^"]` then takes `\"`), so that no set has the character U+0001.
"""

import re

# By the letter of the class: what both count among it, and what either does. ECMA-262, 12.2, 12.3 and 22.2.2.9.
_BOTH = {
    "s": r"\t\n\x0b\x0c\r\x20\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    "d": "0-9",
    "w": "0-9A-Za-z_",
}
_EITHER = {"s": _BOTH["s"] + r"\x1c-\x1f\u0085\ufeff", "d": r"\p{Nd}", "w": r"\p{L}\p{N}\p{M}\p{Pc}"}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f]|\\(?:x(?:[01]|\{)|u(?:00[01]|\{)|U000000[01]|c|[0aebv])")
_PIECE = re.compile(
    r"(?P<set>\[\^?(?:[^\]\\]|\\.)*\])|(?P<property>\\[pP](?:\{[^{}]*\}|.))|(?P<escape>\\.)|(?P<any>\.)|(?P<other>.)",
    re.DOTALL,
)
_WHOLE_SETS = {"[]", "[^]"}  # nothing and anything, in JavaScript alone


def strict_pattern(pattern: str) -> str:
    """The same pattern, or one that matches less. Raises ValueError that says what is not supported."""
    if re.search(r"\\b", pattern):
        raise ValueError("\\b is not supported")
    if _CONTROL.search(pattern):
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
    """A set in which brackets and operators of sets are characters, as in JavaScript."""
    opening = "[^" if written.startswith("[^") else "["
    inner = re.findall(r"\\.|.", written[len(opening) : -1], re.DOTALL)
    is_negated = opening == "[^"
    return opening + "".join(f"\\{one}" if one in "[&~" else _class(one, is_negated=is_negated) for one in inner) + "]"


def _class(escape: str, *, is_negated: bool = False) -> str:
    """What a class stands for; is_negated: it is taken away from a set."""
    letter = escape[1:]
    if letter in _BOTH:
        return f"[{(_EITHER if is_negated else _BOTH)[letter]}]"
    if letter.lower() in _BOTH and len(escape) == 2:
        return f"[^{(_BOTH if is_negated else _EITHER)[letter.lower()]}]"
    return escape


def _without_control(one: str) -> str:
    return rf"[{one}&&[^\x01]]"

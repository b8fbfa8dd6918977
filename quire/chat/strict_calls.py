"""Free text in which the calls of strict tools satisfy their schemas, as a grammar in Lark (docs/structured.md).

The grammar is a machine of states, which are its rules. A state `plain` or `text` has free text. A marker, such as
`<tool_call>` or a special token, leads to a state `begun`, from which the name of a strict tool leads to its arguments.
Any other text is free, too, so that only the arguments of strict tools are constrained. A terminal that is lazy ends
the free text at the first marker. Free text behind a marker excludes what begins a strict call.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from quire.chat.formats import (
    SPECIAL_TOKEN,
    ArgumentStyle,
    CallForm,
    JsonCall,
    NamedCall,
    QuotedArguments,
    TaggedArguments,
    ToolFormat,
)

_ANY = r"(?s:.*)"
_BEFORE_NAME = (  # members with texts or words, and OpenAI's form with a function in the call
    r'(?:"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[^"\s{}\[\],]+)[\s,]*)*(?:"function"\s*:\s*\{\s*)?'
)
_AFTER_NAME = r"(?:\s*|[^A-Za-z0-9_.{\n-][^{\n]*)"
_MORE = r"/[^{\n]+/"
_ARGUMENTS_KEY = r'/\s*,\s*"(arguments|parameters)"\s*:\s*/'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """How a call is written behind its marker. The fields are patterns, and those that end with `_rule` are Lark.

    lead: text up to the name. is_direct: whether it may be empty. prefix: text before the name that may be left out.
    end: text between name and arguments. follows: the first character behind `end`, if `end` may be empty. token_end:
    the part of `end` before its first special token. tokens_rule: the rest, if it begins with a special token.
    before_rule, behind_rule: text around the arguments. close: end of a call within a list; "" if calls are no list.
    """

    lead: str
    is_direct: bool = False
    prefix: str = ""
    end: str
    follows: str = ""
    token_end: str = ""
    tokens_rule: str = ""
    before_rule: str = ""
    behind_rule: str
    arguments: ArgumentStyle
    close: str = ""

    def begins(self, names: str, lead: str) -> Iterator[str]:
        """Terminals of free text that begins a call of one of the names behind `lead`."""
        yield f"/{lead}{self.prefix}{names}{self.end}{self.follows}{_ANY}/"
        if self.tokens_rule:
            yield f"/{lead}{self.prefix}{names}{self.token_end}/"


def strict_calls(format: ToolFormat, schemas: Mapping[str, Mapping[str, object]], barred: Sequence[str] = ()) -> str:
    """The grammar of any text in which each call of these tools has arguments of its schema. schemas: by name.

    barred: names of tools that must not be called. One of both is not empty. A call is seen in each form of the format,
    if its name stands before its arguments.
    """
    styles: defaultdict[str, list[_Style]] = defaultdict(list)  # by marker; "" is the beginning of a line
    has_lists = any(form.has_many for form in format.forms if isinstance(form.call, JsonCall))
    after_names = [form.call.after_name for form in format.forms if isinstance(form.call, NamedCall)]
    for form in format.forms:
        style, found = _style(form, after_names, has_lists=has_lists), styles[_marker(form)]
        if style not in found:
            found.append(style)
    groups: defaultdict[tuple[_Style, ...], list[str]] = defaultdict(list)  # markers by what follows them
    for marker, found in styles.items():
        groups[tuple(found)].append(marker)
    separators = {re.escape(form.separator.strip()) for form in format.forms if form.has_many}
    separators |= {_between_lists(form) for form in format.forms if not _marker(form)}
    return _Machine(schemas, barred, separators).grammar(groups)


def _marker(form: CallForm) -> str:
    """The text that begins a call or a group of calls; of a text with special tokens, the last of these."""
    begin = form.begin.strip()
    if isinstance(form.call, NamedCall) and form.call.begin:
        begin = form.call.begin
    tokens = SPECIAL_TOKEN.findall(begin)
    return tokens[-1] if tokens else begin


def _between_lists(form: CallForm) -> str:
    """The pattern of the text between two lists of calls without markup. The second one may be in the same line."""
    return rf"{_pattern(form.close)}\s*{_pattern(form.open)}" if form.close else ""


def _name_key(call: JsonCall) -> str:
    """The pattern of the key of a name, with what may stand before it."""
    return rf'{_BEFORE_NAME}"(?:{"|".join([*call.names, "function"])})"\s*:\s*"'


def _style(form: CallForm, after_names: Sequence[str], *, has_lists: bool) -> _Style:
    """The style of a form. after_names: of all forms. has_lists: whether the format has lists of JSON calls."""
    call = form.call
    if isinstance(call, JsonCall):
        return _Style(
            # A lazy terminal ends at the first brackets that may end a call. The rest between two calls follows.
            lead=(r"[\s}\],;]*" if has_lists else r"\s*") + r"\[?\s*\{?\s*" + _name_key(call),
            end='"',
            before_rule=_ARGUMENTS_KEY,
            behind_rule=r"/\s*\}/",
            arguments="json",
            close=r"\}\s*\}\s*" if has_lists else "",
        )
    behind_rule = f"%special {_quoted(call.end)}" if call.end else ""
    if call.arguments == "python":
        return _Style(
            lead=r"\s*\[?\s*",
            is_direct=True,
            end=r"\s*\(",
            behind_rule=behind_rule,
            arguments="python",
            close=r"\)\s*" if form.has_many else "",
        )
    end, lead = call.name_end.strip(), call.begin.rpartition(_marker(form))[2]
    # With the first character of a key, the end of the call begins, too.
    first = call.arguments.key_begin[0] if isinstance(call.arguments, TaggedArguments) else "{"
    token_end, tokens_rule = "", ""
    if SPECIAL_TOKEN.match(end):
        number = "[0-9]{1,3}" if call.is_numbered else ""
        texts = sorted({_pattern(SPECIAL_TOKEN.split(one)[0].strip()) for one in after_names} - {""})
        token_end = rf"(?:\s*(?:{'|'.join(texts)}){number})?\s*" if texts else r"\s*"
        between = sorted({token for one in after_names for token in SPECIAL_TOKEN.findall(one)})
        tokens_rule = (f"({_tokens(only=between)} {_MORE}?)? " if between else "") + _tokens(only=[end])
    return _Style(
        lead=_pattern(lead),
        is_direct=not lead,
        prefix=f"(?:{_pattern(call.name_prefix)})?" if call.name_prefix else "",
        end=(_AFTER_NAME if any(after_names) and end else r"\s*") + _pattern(end) + r"\s*",
        follows="" if end else _pattern(first),
        token_end=token_end,
        tokens_rule=tokens_rule,
        behind_rule=behind_rule,
        arguments=call.arguments,
    )


class _Machine:
    """Writes a grammar. separators: patterns of the texts between two calls of a list, or of two lists."""

    def __init__(
        self, schemas: Mapping[str, Mapping[str, object]], barred: Sequence[str], separators: Iterable[str]
    ) -> None:
        self._schemas = schemas
        self._names = f"(?:{'|'.join(map(_pattern, [*schemas, *barred]))})"
        self._separators = sorted(separators)
        self._ways: defaultdict[str, list[str]] = defaultdict(list)  # expressions that lead to a state
        self._excluded: dict[str, list[str]] = {}  # by state that free text may follow: terminals that it may not be
        self._items: dict[str, tuple[str, str]] = {}  # by state within a list: the state of an item, and what is before
        self._lines: list[str] = []
        self._named: dict[_Style, str] = {}  # by style without its lead: the state directly before a name
        self._styles: list[ArgumentStyle] = []  # of arguments whose rules are written
        self._rules: dict[str, str] = {}  # names of rules and terminals by their bodies

    def grammar(self, groups: Mapping[tuple[_Style, ...], Sequence[str]]) -> str:
        """The grammar. groups: markers by the styles of the calls that they begin."""
        tokens = [marker for markers in groups.values() for marker in markers if SPECIAL_TOKEN.fullmatch(marker)]
        self._ways["plain"] += ["", f"any {_tokens(excluded=tokens)}"]
        self._excluded["plain"] = []
        before = {}  # by state behind a marker: pattern of free text with the marker
        for number, (styles, markers) in enumerate(groups.items()):
            self._add_group(f"begun{number}", f"called{number}", styles)
            before[f"begun{number}"] = _before(markers)
            own = [marker for marker in markers if marker in tokens]
            self._ways[f"begun{number}"] += [f"any {_tokens(only=own)}"] if own else []
        for state, excluded in self._excluded.items():
            self._add_free_text(state, excluded, before)
        states = " | ".join([*self._excluded, "text"])
        rules = [f"{state}: {' | '.join(ways)}" for state, ways in self._ways.items()]
        return "\n".join([f"start: {states}", f"any: {states}", *rules, *self._lines])

    def _add_group(self, begun: str, called: str, styles: Sequence[_Style]) -> None:
        """The states behind the markers of a group. called: the one behind a call that may be in a list."""
        self._excluded[begun] = [
            text for style in styles if style.is_direct for text in style.begins(self._names, style.lead)
        ]
        closes = "|".join(sorted({style.close for style in styles} - {""}))
        between = f"(?:{closes})(?:{'|'.join(self._separators)})"
        if closes:
            after = "|".join(rf"\s*{one}" if one else r"\s+" for one in self._separators)
            if self._schemas:
                self._ways[begun].append(f"{called} {self._lazy(f'/{after}/')}")
                self._excluded[called] = []
            self._items[begun] = begun, between
        for style in styles:
            if style.is_direct:
                self._add_calls(called if style.close else "plain", begun, style, style.lead)
                continue
            without_lead = replace(style, lead="")
            known = without_lead in self._named
            state = self._named.setdefault(without_lead, f"named{len(self._named)}")
            self._ways[state].append(f"{begun} {self._lazy(f'/{style.lead}/')}")
            if known:
                continue
            self._excluded[state] = list(style.begins(self._names, ""))
            if closes:
                self._items[state] = begun, between
            self._add_calls(called if style.close else "plain", state, style, "")

    def _add_free_text(self, state: str, excluded: Sequence[str], before: Mapping[str, str]) -> None:
        """Free text behind a state, up to the end or with the next marker."""
        self._ways["text"].append(f"{state} {self._without('/(?s:.+)/', excluded)}")
        ways = list(before.items())
        if state in self._items:
            target, between = self._items[state]
            ways.append((target, f"{_ANY}{between}"))
        for target, pattern in ways:
            self._ways[target].append(f"{state} {self._lazy(self._without(f'/{pattern}/', excluded))}")

    def _add_calls(self, called: str, begun: str, style: _Style, lead: str) -> None:
        """The calls of strict tools, from the lead on, lead from one state to another."""
        if style.arguments not in self._styles:
            self._styles.append(style.arguments)
            for index, schema in enumerate(self._schemas.values()):
                self._lines.append(f"{self._arguments(style, index)}: {arguments_directive(style.arguments, schema)}")
        calls = []
        for index, name in enumerate(self._schemas):
            begin = lead + style.prefix + _pattern(name)
            around = self._rule(style.before_rule), self._arguments(style, index), self._rule(style.behind_rule)
            calls.append(f"/{begin}{style.end}/ {' '.join(around)}")
            if style.tokens_rule:
                calls.append(f"/{begin}{style.token_end}/ {self._rule(style.tokens_rule)} {' '.join(around)}")
        if calls:
            self._ways[called].append(f"{begun} ({' | '.join(calls)})")

    def _arguments(self, style: _Style, index: int) -> str:
        return f"arguments{self._styles.index(style.arguments)}_{index}"

    def _rule(self, body: str) -> str:
        """The name of a rule, so that a long one is written once; "" for none."""
        if body and body not in self._rules:
            self._rules[body] = f"rule{len(self._rules)}"
            self._lines.append(f"{self._rules[body]}: {body}")
        return self._rules.get(body, "")

    def _lazy(self, body: str) -> str:
        self._lines.append(f"lazy{len(self._lines)}[lazy]: {body}")
        return f"lazy{len(self._lines) - 1}"

    def _without(self, body: str, excluded: Sequence[str]) -> str:
        """A terminal that matches none of the others."""
        if not excluded:
            return body
        either = " | ".join(excluded)
        if either not in self._rules:
            self._rules[either] = f"CALL{len(self._rules)}"
            self._lines.append(f"{self._rules[either]}: {either}")
        self._lines.append(f"TEXT{len(self._lines)}: {body} & ~{self._rules[either]}")
        return f"TEXT{len(self._lines) - 1}"


def _before(markers: Sequence[str]) -> str:
    """The pattern of free text with one of the markers behind it."""
    texts = "|".join(_pattern(marker) for marker in markers if marker)
    line = rf"(?:{_ANY}\n)?[ \t\r]*[\[{{]"  # the first bracket of a call without markup
    return "|".join([f"{_ANY}(?:{texts})"] * bool(texts) + [line] * ("" in markers))


def arguments_directive(style: ArgumentStyle, schema: Mapping[str, object]) -> str:
    """The directive of Lark for arguments of a schema in this style."""
    if isinstance(style, TaggedArguments | QuotedArguments):
        directive = "%tagged" if isinstance(style, TaggedArguments) else "%quoted"
        return f"{directive} {json.dumps({'schema': schema, **asdict(style)})}"
    return f"{'%json' if style == 'json' else '%keywords'} {json.dumps(schema)}"


def _tokens(*, only: Sequence[str] = (), excluded: Sequence[str] = ()) -> str:
    """One special token: one of these texts, or any but those that are excluded."""
    return f"%tokens {json.dumps({'only': only} if only else {'except': excluded}, ensure_ascii=False)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A pattern of Lark that matches this text."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")

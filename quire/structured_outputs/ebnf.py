"""Translation of EBNF grammars to Lark. The syntax is that of llama.cpp (GBNF), xgrammar and SGLang (`root ::= ...`).

Rules from which no recursive rule can be reached become terminals, which are regular expressions. A grammar without
recursion is one terminal. In other grammars a terminal of llguidance matches as much text as it can. If that could be
too much, each character becomes a terminal, which is slower.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import permutations

from quire.errors import RequestError
from quire.params import MAX_LITERAL
from quire.structured_outputs.lark import MAX_RULES, check_length, check_total_nesting

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included

LAST = 0x10FFFF
_MAX_STEPS = 50_000


@dataclass(frozen=True, slots=True)
class Text:
    """A sequence of characters, each of a set. lark: the same as a Lark literal or pattern."""

    lark: str
    sets: tuple[Ranges, ...]


@dataclass(frozen=True, slots=True)
class Name:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """The parts, one after another."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of the options."""

    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A repeated part. quantifier: "*", "+", "?" or "{m,n}", as in Lark."""

    part: "Node"
    quantifier: str


Node = Text | Name | Sequence | Either | Repeat


def parts_of(node: Node) -> tuple[Node, ...]:
    """The children of a node."""
    match node:
        case Sequence(parts) | Either(parts):
            return parts
        case Repeat(part, _):
            return (part,)
    return ()


def leaves(node: Node) -> Iterator[Text | Name]:
    """The texts and names in a node."""
    if isinstance(node, Text | Name):
        yield node
    for part in parts_of(node):
        yield from leaves(part)


class TooLarge(Exception):
    """A grammar is too large to be analysed."""


class FirstSets:
    """Character sets of the rules of a grammar, as bit masks over ranges of code points. Raises TooLarge."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        texts = (leaf for body in rules.values() for leaf in leaves(body) if isinstance(leaf, Text))
        ends = {end for text in texts for one in text.sets for low, high in one for end in (low, high + 1)}
        self._cuts = sorted(ends)
        self._num_steps = 0
        self._empty = dict.fromkeys(rules, False)
        self._first = dict.fromkeys(rules, 0)
        self._characters = dict.fromkeys(rules, 0)
        self._continuations = dict.fromkeys(rules, 0)
        is_new = True
        order = list(rules.items())
        while is_new:
            is_new = False
            order.reverse()  # rules mostly refer to later ones
            for name, body in order:
                known = self._known(name)
                self._empty[name] = self.may_be_empty(body)
                self._first[name] = self.first(body)
                self._characters[name] = self.characters(body)
                self._continuations[name] = self.continuations(body)
                is_new = is_new or known != self._known(name)

    def count_step(self) -> None:
        """Count a step of the analysis. Raises TooLarge after _MAX_STEPS steps."""
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise TooLarge

    def may_be_empty(self, node: Node) -> bool:
        """Whether the node matches the empty text."""
        self.count_step()
        match node:
            case Text(_, sets):
                return not sets
            case Name(name):
                return self._empty[name]
            case Sequence(parts):
                return all(map(self.may_be_empty, parts))
            case Either(options):
                return any(map(self.may_be_empty, options))
            case Repeat(part, how):
                return how in "*?" or how.startswith("{0,") or self.may_be_empty(part)

    def first(self, node: Node) -> int:
        """The characters that a match can begin with."""
        match node:
            case Text(_, sets):
                return self._mask(sets[0]) if sets else 0
            case Name(name):
                return self._first[name]
            case Sequence(parts):
                found = 0
                for part in parts:
                    found |= self.first(part)
                    if not self.may_be_empty(part):
                        break
                return found
        return self._union(self.first, node)

    def characters(self, node: Node) -> int:
        """The characters that a match can contain."""
        self.count_step()
        match node:
            case Text(_, sets):
                found = 0
                for one in sets:
                    found |= self._mask(one)
                return found
            case Name(name):
                return self._characters[name]
        return self._union(self.characters, node)

    def continuations(self, node: Node) -> int:
        """The characters with which a complete match can continue to a longer one, or a superset of them."""
        match node:
            case Text():
                return 0
            case Name(name):
                return self._continuations[name]
            case Sequence(parts):
                found = 0
                for part in reversed(parts):
                    found |= self.continuations(part)
                    if not self.may_be_empty(part):
                        break
                    found |= self.first(part)
                return found
            case Either(options):
                found = self._union(self.continuations, node)
                seen = 0
                for option in options:  # with a common first character, one option may match more
                    if seen & self.first(option):
                        return found | self.characters(node)
                    seen |= self.first(option)
                return found
            case Repeat(part, how):
                return self.continuations(part) | (0 if how == "?" else self.first(part))

    def _known(self, name: str) -> tuple[bool, int, int, int]:
        return self._empty[name], self._first[name], self._characters[name], self._continuations[name]

    def _union(self, of: Callable[[Node], int], node: Node) -> int:
        found = 0
        for part in parts_of(node):
            found |= of(part)
        return found

    def _mask(self, ranges: Ranges) -> int:
        found = 0
        for low, high in ranges:
            first, last = bisect_right(self._cuts, low), bisect_right(self._cuts, high)
            found |= (1 << (last + 1)) - (1 << first)
        return found


_MAX_NESTING = 24
_MAX_REPEAT = 10_000

_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w.-]*\s*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<rule>[A-Za-z_][\w.-]*\s*::=)
    |(?P<name>[A-Za-z_][\w.-]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<repeat>[*+?]|\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[()|.])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b"}


def is_ebnf(text: str) -> bool:
    """Whether a grammar is EBNF and not Lark."""
    return bool(_RULE.search(text))


def ebnf_to_lark(text: str) -> str:
    """The same grammar in Lark; the start rule is `root`. Raises RequestError that names the line of a syntax error."""
    start, lines = ebnf_rules(text)
    return "\n".join([f"start: {start}", *lines]) + "\n"


def ebnf_rules(text: str, *, then: Iterable[str] = (), suffix: str = "") -> tuple[str, list[str]]:
    """The name of the start rule, and all rules in Lark. Raises RequestError that names the line of a syntax error.

    then: one of these texts follows a text of the grammar. suffix: of the names of all rules.
    """
    check_length(len(text))
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise RequestError("grammar: there is no rule root ::= ...", "grammar")
    start = "root"
    texts = tuple(map(_literal, then))
    if texts:
        start = "root and what follows"  # no name of EBNF
        rules[start] = Sequence((Name("root"), Either(texts)))
    recursive = _recursive(rules)
    is_apart = start not in recursive or _are_terminals_exact(rules, recursive)
    names = {name: f"{'T' if is_apart and name not in recursive else 'r'}{i}{suffix}" for i, name in enumerate(rules)}
    lines = [f"{names[rule]}: {_to_lark(body, names, use_terminals=is_apart)}" for rule, body in rules.items()]
    return names[start], lines


class _Parser:
    """Recursive descent parser. A rule ends where the next begins."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._next = 0
        self._deepest = 0  # deepest level of parentheses and repetitions in the rule

    def rules(self) -> dict[str, Node]:
        """The bodies of the rules by name."""
        rules: dict[str, Node] = {}
        num_levels = 0
        while self._kind():
            written = self._expect("rule", "a rule: name ::= ...")
            name = written.removesuffix("::=").strip()
            if name in rules:
                raise self._error(f"rule {name!r:.100} is defined twice")
            self._deepest = 0
            rules[name] = self._either(0)
            num_levels += 1 + self._deepest
            if len(rules) > MAX_RULES:
                raise self._error(f"more than {MAX_RULES} rules")
        check_total_nesting(num_levels)
        return rules

    def _split(self) -> Iterator[tuple[str, str, int]]:
        place = 0
        while place < len(self._text):
            found = _TOKEN.match(self._text, place)
            if found is None:
                raise self._error(f"unexpected {self._text[place : place + 20]!r}", place)
            if found.lastgroup == "text" and len(found[0]) > MAX_LITERAL:
                raise self._error(f"a text must have at most {MAX_LITERAL:,} characters", place)
            if found.lastgroup != "space":
                yield str(found.lastgroup), found[0], place
            place = found.end()

    def _kind(self) -> str:
        """The kind of the next token; "" at the end."""
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def _mark(self) -> str:
        return self._tokens[self._next][1] if self._kind() == "mark" else ""

    def _expect(self, kind: str, what: str) -> str:
        if self._kind() != kind:
            raise self._error(f"expected {what}")
        self._next += 1
        return self._tokens[self._next - 1][1]

    def _error(self, why: str, place: int | None = None) -> RequestError:
        if place is None:
            place = self._tokens[self._next][2] if self._next < len(self._tokens) else len(self._text)
        return RequestError(f"grammar, line {self._text.count(chr(10), 0, place) + 1}: {why}", "grammar")

    def _either(self, depth: int) -> Node:
        if depth > _MAX_NESTING:
            raise self._error(f"parentheses are nested more than {_MAX_NESTING} levels deep")
        self._deepest = max(self._deepest, depth)
        options = [self._sequence(depth)]
        while self._mark() == "|":
            self._next += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._kind() in ("name", "text", "set") or self._mark() in ("(", "."):
            part = self._part(depth)
            if self._kind() == "repeat":
                self._deepest = max(self._deepest, depth + 1)
                part = Repeat(part, self._quantifier(self._expect("repeat", "a repetition")))
            parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self, depth: int) -> Node:
        kind, written = self._tokens[self._next][:2]
        self._next += 1
        if kind == "name":
            return Name(written)
        if kind == "text":
            characters = "".join(one for one, _ in self._characters(written[1:-1]))
            return _literal(characters)
        if kind == "set":
            return self._set(written[1:-1])
        if written == ".":
            return Text("/(?s:.)/", (((0, LAST),),))
        inner = self._either(depth + 1)
        if self._expect("mark", "')'") != ")":
            raise self._error("expected ')'")
        return inner

    def _characters(self, written: str) -> list[tuple[str, bool]]:
        """(character, whether it was written without an escape) of each character."""
        found = []
        for match in _CHARACTER.finditer(written):
            number = match[1] or match[2] or match[3]
            if number:
                if not int(number, 16) <= 0x10FFFF or 0xD800 <= int(number, 16) < 0xE000:
                    raise self._error(f"{match[0]} is not a Unicode character")
                found.append((chr(int(number, 16)), False))
            elif match[4]:
                found.append((_ESCAPES.get(match[4], match[4]), False))
            else:
                found.append((match[5], True))
        return found

    def _set(self, written: str) -> Text:
        negated = written.startswith("^")
        characters = self._characters(written[negated:])
        ranges: list[tuple[int, int]] = []
        place = 0
        while place < len(characters):
            low = high = characters[place][0]
            if place + 2 < len(characters) and characters[place + 1] == ("-", True):
                high = characters[place + 2][0]
                place += 2
            if high < low:
                raise self._error(f"the range {low}-{high} is empty")
            ranges.append((ord(low), ord(high)))
            place += 1
        if not ranges:
            raise self._error("a set must have at least one character")
        inner = "".join(rf"\u{{{low:x}}}-\u{{{high:x}}}" for low, high in ranges)
        return Text(f"/[{'^' if negated else ''}{inner}]/", (_complement(ranges) if negated else tuple(ranges),))

    def _quantifier(self, written: str) -> str:
        if written in "*+?":
            return written
        bounds = [int(part) if part.strip() else None for part in written[1:-1].split(",")]
        low, high = bounds[0] or 0, bounds[-1]
        if max(low, high or 0) > _MAX_REPEAT or bounds == [None]:
            raise self._error(f"repetitions are {{m}}, {{m,}} or {{m,n}} with at most {_MAX_REPEAT:,}")
        if high is not None and high < low:
            raise self._error(f"the repetition {written} is empty")
        return f"{{{low},{'' if high is None else high}}}"


def _literal(characters: str) -> Text:
    return Text(json.dumps(characters, ensure_ascii=False), tuple(((ord(one), ord(one)),) for one in characters))


def _complement(ranges: list[tuple[int, int]]) -> Ranges:
    """The complement of these ranges."""
    others, place = [], 0
    for low, high in sorted(ranges):
        if place < low:
            others.append((place, low - 1))
        place = max(place, high + 1)
    return (*others, (place, LAST)) if place <= LAST else tuple(others)


def _recursive(rules: Mapping[str, Node]) -> set[str]:
    """The rules from which a recursive rule can be reached."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    waiting: dict[str, int] = {}
    for rule, body in rules.items():
        used = {leaf.name for leaf in leaves(body) if isinstance(leaf, Name)}
        for name in used:
            if name not in rules:
                raise RequestError(f"grammar: there is no rule {name!r:.100}", "grammar")
            users[name].append(rule)
        waiting[rule] = len(used)
    ready = [rule for rule, count in waiting.items() if not count]
    for rule in ready:  # grows: rules of which all references are in it
        for user in users[rule]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return rules.keys() - set(ready)


def _are_terminals_exact(rules: Mapping[str, Node], recursive: Set[str]) -> bool:
    """Whether longest-match terminals in recursive rules are exact. False if the grammar is too large to tell."""
    try:
        return _is_unambiguous(rules, recursive, FirstSets(rules))
    except TooLarge:
        return False


def _is_unambiguous(rules: Mapping[str, Node], recursive: Set[str], shapes: FirstSets) -> bool:
    behind = dict.fromkeys(recursive, 0)  # characters that can follow a rule
    terminals: dict[Node, int] = {}  # characters that can follow a terminal
    order = [rule for rule in rules if rule in recursive][::-1]
    is_new = True
    while is_new:
        known = dict(behind), dict(terminals)
        order.reverse()
        for rule in order:
            _add_follow_sets(rules[rule], behind[rule], shapes, behind, terminals)
        is_new = known != (behind, terminals)
    if any(shapes.continuations(one) & follows for one, follows in terminals.items()):
        return False
    sets = [(shapes.first(one), shapes.characters(one), follows) for one, follows in terminals.items()]
    for (first, _, follows), (other_first, characters, _) in permutations(sets, 2):
        shapes.count_step()
        if first & other_first and characters & follows:
            return False
    return True


def _add_follow_sets(
    node: Node, follows: int, shapes: FirstSets, rule_follow_sets: dict[str, int], terminal_follow_sets: dict[Node, int]
) -> None:
    """Add to the follow sets what can follow the rules and terminals in a node. follows: what follows it."""
    shapes.count_step()
    match node:
        case Name(name) if name in rule_follow_sets:
            rule_follow_sets[name] |= follows
        case Text() | Name():
            terminal_follow_sets[node] = terminal_follow_sets.get(node, 0) | follows
        case Sequence(parts):
            for part in reversed(parts):
                _add_follow_sets(part, follows, shapes, rule_follow_sets, terminal_follow_sets)
                follows = shapes.first(part) | (follows if shapes.may_be_empty(part) else 0)
        case Either(options):
            for option in options:
                _add_follow_sets(option, follows, shapes, rule_follow_sets, terminal_follow_sets)
        case Repeat(part, how):
            again = 0 if how == "?" else shapes.first(part)
            _add_follow_sets(part, follows | again, shapes, rule_follow_sets, terminal_follow_sets)


def _to_lark(node: Node, names: Mapping[str, str], *, use_terminals: bool) -> str:
    """A node in Lark. Unless is_apart, a literal is written as single characters."""
    match node:
        case Text(lark, sets):
            if use_terminals or len(sets) < 2:
                return lark
            return " ".join(_literal(one).lark for one in json.loads(lark))
        case Name(name):
            return names[name]
        case Sequence(parts):
            return " ".join(_grouped(part, names, use_terminals=use_terminals) for part in parts) or '""'
        case Either(options):
            return " | ".join(_to_lark(option, names, use_terminals=use_terminals) for option in options)
        case Repeat(part, how):
            return f"({_to_lark(part, names, use_terminals=use_terminals)}){how}"


def _grouped(node: Node, names: Mapping[str, str], *, use_terminals: bool) -> str:
    written = _to_lark(node, names, use_terminals=use_terminals)
    return f"({written})" if isinstance(node, Either) else written

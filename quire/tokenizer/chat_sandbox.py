"""A Jinja sandbox with limits on processor time and size.

Jinja's immutable sandbox prevents access to Python objects outside of it. To enforce the limits, the compiled code
passes loop items, list, tuple and dict literals, concatenations and captured blocks through the environment, as it does
with calls, filters and operators.
"""

import json
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.tokenizer.messages import NoContent


class MeteredCode(CodeGenerator):
    """Code generator that calls the environment's `counted` (loop items), `measured` (literals) and `joined` (`~`)."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        """A loop, whose items pass through `counted`."""
        counted = nodes.EnvironmentAttribute("counted", lineno=node.lineno)
        node.iter = nodes.Call(counted, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """`[a, b]`."""
        self.write("environment.measured(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """`(a, b)`, unless it is a target of assignment."""
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.measured(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """`{a: b}`."""
        self.write("environment.measured(")
        super().visit_Dict(node, frame)
        self.write(")")


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks assistant text for training, as its body alone."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


MAX_SECONDS = 2.0  # processor time of the thread, for one rendering
MAX_SIZE = 2**23  # characters in one value
MAX_TOTAL = 2**27  # characters in all values together
MAX_WORK = 2**26  # length of a text times the length of an operand
ITEM_SIZE = 8  # characters that a container, a number and an item count in addition to their text
_WIDE_FIELD = re.compile(r"\d{4}")
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class LimitExceeded(Exception):
    """A template exceeded a limit."""


class Meter:
    """Counts the time and the size of one rendering. seconds: processor time from now on."""

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._deadline = time.thread_time() + seconds
        self._total = 0

    def step(self) -> None:
        """Check the time before an operation. Raises LimitExceeded."""
        if time.thread_time() > self._deadline:
            raise LimitExceeded("it ran too long")

    def measure(self, value: object) -> int:
        """Add the size of `value` to the total and return it, in characters. Raises LimitExceeded."""
        size = size_of(value)
        self._total += size
        if self._total > MAX_TOTAL:
            raise LimitExceeded("its values are too large in total")
        return size

    def count(self, items: Iterator[object]) -> Iterator[object]:
        """The same items, each as a step and measured. Raises LimitExceeded."""
        for item in items:
            self.step()
            self.measure(item)
            yield item


def size_of(value: object) -> int:
    """Size in characters of a value of strings, numbers, lists and mappings. Raises LimitExceeded above MAX_SIZE."""
    if isinstance(value, str):
        stack, size = [], len(value)
    else:
        stack, size = [value], 0
    while stack and size <= MAX_SIZE:
        item = stack.pop()
        size += ITEM_SIZE
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length()
        elif isinstance(item, Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, _CONTAINERS):
            stack += item
        elif isinstance(item, range):
            size += ITEM_SIZE * len(item)
    if size > MAX_SIZE:
        raise LimitExceeded(f"it creates a value of more than {MAX_SIZE} characters")
    return size


def check_growth(value: object, operands: Sequence[object]) -> None:
    """Raises LimitExceeded if the size of `value` times the largest operand exceeds MAX_WORK."""
    longest = max([abs(o) if isinstance(o, int) else size_of(o) for o in operands], default=1)
    if max(1, size_of(value)) * longest > MAX_WORK:
        raise LimitExceeded("it multiplies the size of a text by too much")


def check_format(text: str, operands: Sequence[object]) -> None:
    """Raises LimitExceeded for a format string with wide fields or large operands."""
    if _WIDE_FIELD.search(text):
        raise LimitExceeded("it formats a field of a thousand characters or more")
    check_growth(text, operands)


def check_numbers(operator: str, left: object, right: object) -> None:
    """Raises LimitExceeded for a product or power of integers with thousands of digits."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_SIZE // 1024:
            raise LimitExceeded("it computes a number with thousands of digits")


class PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore, and without content in its repr."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (as dict)
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r:.80}")


class NewDict:
    """`dict(...)` and `dict.fromkeys(...)`, without the other attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 (as dict)
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[object], value: object = None) -> dict[Any, Any]:
        """A dict with these keys."""
        return dict.fromkeys(keys, value)


def tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (the field's signature)
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """JSON without HTML escapes, unlike Jinja's filter. Raises LimitExceeded for a wide indent."""
    if indent is not None and not 0 <= indent <= 16:
        raise LimitExceeded("it indents JSON by more than 16 spaces")
    marks = None if separators is None else (str(separators[0])[:16], str(separators[1])[:16])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=marks, sort_keys=sort_keys)


def raise_exception(message: object) -> None:
    """Called by templates to refuse messages. Raises TemplateError."""
    raise TemplateError(str(message))


def strftime_now(pattern: str) -> str:
    """The local date and time, formatted by `pattern`."""
    check_format(pattern, ())
    return datetime.now().strftime(pattern)


# The time of these, or the length of their result, is the product of their operands.
_COSTLY_METHODS = frozenset(
    {"center", "expandtabs", "join", "ljust", "lstrip", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip"}
    | {"strip", "translate", "zfill"}
)
_COSTLY_FILTERS = frozenset({"batch", "indent", "join", "replace", "slice", "trim", "truncate"})
# These take even more, and no chat template needs them.
_REFUSED_METHODS = frozenset({"striptags"})
_REFUSED_FILTERS = ("center", "pprint", "random", "round", "striptags", "sum", "urlize", "wordwrap", "xmlattr")
_REFUSED_GLOBALS = ("lipsum",)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders one template at a time. Set a new `meter` before each compilation and each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self.measured,
            extensions=[GenerationBlock, loopcontrols],
        )
        self.meter = Meter()
        self.code_generator_class = MeteredCode
        self.filters["tojson"] = tojson
        self.tests["none"] = lambda value: value is None or isinstance(value, NoContent)
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        for name in _REFUSED_GLOBALS:
            del self.globals[name]
        self.filters = {name: self._metered(name, function) for name, function in self.filters.items()}
        self.globals.update(
            raise_exception=raise_exception, strftime_now=strftime_now, namespace=PlainNamespace, dict=NewDict()
        )

    def measured(self, value: object) -> object:
        """Measure a value and return it."""
        self.meter.measure(value)
        return value

    def counted(self, items: Iterable[object]) -> Iterator[object]:
        """The items of a loop, each as a step and measured."""
        return self.meter.count(iter(items))

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a captured block. Jinja calls it at the end of the block."""
        return self.joined(pieces)

    def joined(self, pieces: Iterable[object]) -> str:
        """The operands of `~`, joined."""
        texts = [str(piece) for piece in pieces]
        self.meter.step()
        self.meter.measure(texts)
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 (Jinja's)
        """The result of a binary operator, with limits on its size."""
        self.meter.step()
        if operator == "%" and isinstance(left, str):
            check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator in ("*", "**"):
            check_numbers(operator, left, right)
            if not isinstance(left, int | float):
                check_growth(left, (right,))
            elif not isinstance(right, int | float):
                check_growth(right, (left,))
        return self.measured(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (Jinja's)
        """The result of a function, method or macro, with limits on costly methods of strings."""
        self.meter.step()
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            args = tuple(self._materialized(arg) for arg in args)
            if function.__name__ in _REFUSED_METHODS:
                raise SecurityError(f"it calls {function.__name__}")
            if function.__name__ in _COSTLY_METHODS:
                check_growth(text, (*args, *kwargs.values()))
            elif function.__name__ == "replace":
                check_growth(text, args[1:])
        return self.measured(super().call(context, function, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:  # noqa: ANN401 (Jinja's)
        """Raises SecurityError. Jinja would continue with an undefined value."""
        raise SecurityError(f"it accesses {attribute!r:.80} of {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401 (Jinja's)
        """Jinja's sandboxed `str.format`, with a limit on its size."""
        bounded = super().wrap_str_format(value)
        if bounded is None:
            return None

        def formatted(*args: object, **kwargs: object) -> str:
            check_format(value.__self__, (*args, *kwargs.values()))
            return bounded(*args, **kwargs)

        return formatted

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the first argument is a context or environment

        @wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            self.meter.step()
            args = tuple(self._materialized(arg) for arg in args)
            operands = (*args[skipped + 1 :], *kwargs.values())
            if name == "format":
                check_format(str(args[skipped]), operands)
            elif name in _COSTLY_FILTERS:
                check_growth(args[skipped], operands)
            return self.measured(function(*args, **kwargs))

        return run

    def _materialized(self, value: object) -> object:
        return list(self.counted(value)) if isinstance(value, Iterator) else value

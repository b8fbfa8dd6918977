"""A Jinja sandbox with limits on processor time and size.

Jinja's immutable sandbox prevents access to Python objects outside of it. To enforce the limits, the compiled code
passes loop items, list, tuple and dict literals, concatenations and captured blocks through the environment, as it does
with calls, filters and operators.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter, make_multi_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum

from quire.tokenizer.chat_costs import (
    ATTRIBUTE_POSITIONS,
    FILTER_CHECKS,
    LimitExceeded,
    Meter,
    check_format,
    check_growth,
    check_numbers,
    check_tags,
)
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
        """The body of the block, whose variables are its own."""
        line = next(parser.stream).lineno
        return [nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)]


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


@pass_environment
def summed(environment: "Sandbox", iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:  # noqa: ANN401
    """The sum of items, as Jinja's filter. Sums of lists, which grow with each item, are measured one by one."""
    items = iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable)
    if not isinstance(start, list | tuple):
        return sum(items, start)
    for item in items:
        environment.meter.step()
        start = environment.measured(start + item)
    return start


def lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:  # noqa: FBT001, FBT002 (Jinja's)
    """Invented text, as Jinja's function. Raises LimitExceeded for too many words or paragraphs."""
    if not (isinstance(n, int) and isinstance(max, int)):
        raise TemplateError("lipsum takes whole numbers")
    if n > _MAX_INVENTED or n * max > _MAX_INVENTED:
        raise LimitExceeded(f"it invents more than {_MAX_INVENTED} words")
    return generate_lorem_ipsum(n, html, min, max)


_MAX_INVENTED = 2**16  # words, and paragraphs, which may be empty
_GLOBALS = ("cycler", "joiner", "range")  # of Jinja, as they are
# The time of these, or the length of their result, is the product of their operands.
_COSTLY_METHODS = frozenset(
    {"center", "expandtabs", "join", "ljust", "lstrip", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip"}
    | {"strip", "translate", "zfill"}
)


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
        self.tests["none"] = lambda value: value is None or isinstance(value, NoContent)
        filters = {**self.filters, "tojson": tojson, "sum": summed}
        self.filters = {name: self._metered(name, filters[name]) for name in FILTER_CHECKS if name in filters}
        self.globals = {name: function for name, function in self.globals.items() if name in _GLOBALS}
        self.globals.update(
            raise_exception=raise_exception,
            strftime_now=strftime_now,
            namespace=PlainNamespace,
            dict=NewDict(),
            lipsum=lipsum,
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
            if function.__name__ in _COSTLY_METHODS:
                check_growth(text, (*args, *kwargs.values()))
            elif function.__name__ == "striptags":  # of a text that is marked as safe
                check_tags(text)
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
        check = FILTER_CHECKS[name]
        position = ATTRIBUTE_POSITIONS.get(name)
        getter = make_multi_attrgetter if name == "sort" else make_attrgetter

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401 (the filter's)
            self.meter.step()
            args = tuple(self._materialized(arg) for arg in args)
            value, operands = args[skipped], args[skipped + 1 :]
            if check is not None:
                check(value, operands, kwargs)
            if position is not None:
                attribute = operands[position] if len(operands) > position else kwargs.get("attribute")
                if attribute is not None:
                    for item in map(getter(self, attribute), self.counted(value)):
                        self.measured(item)
            return self.measured(function(*args, **kwargs))

        return run

    def _materialized(self, value: object) -> object:
        return list(self.counted(value)) if isinstance(value, Iterator) else value

"""A Jinja environment in which a template can neither reach out nor run away. Knows nothing of chats.

Reaching out is what Jinja's immutable sandbox prevents. Running away is prevented by metering: the
compiled code passes each loop's items, each literal, each concatenation and each buffer through the
environment, as it already does with calls, filters and operators.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.tokenizer.template_code import GenerationBlock, MeteredCode
from quire.tokenizer.template_meter import Meter, check_format, check_growth, check_numbers
from quire.tokenizer.template_names import NewDict, PlainNamespace, raise_exception, strftime_now, tojson

# What these cost, or the length of what they return, is the product of their operands.
_COSTLY_METHODS = frozenset(
    {"center", "expandtabs", "join", "ljust", "lstrip", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip"}
    | {"strip", "translate", "zfill"}
)
_COSTLY_FILTERS = frozenset({"batch", "indent", "join", "replace", "slice", "trim", "truncate"})
# These cost even more, and no chat template needs them.
_REFUSED_METHODS = frozenset({"striptags"})
_REFUSED_FILTERS = ("center", "pprint", "random", "round", "striptags", "sum", "urlize", "wordwrap", "xmlattr")
_REFUSED_GLOBALS = ("lipsum",)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs one template at a time. Set `meter` anew before each compilation and each rendering."""

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
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        for name in _REFUSED_GLOBALS:
            del self.globals[name]
        self.filters = {name: self._metered(name, function) for name, function in self.filters.items()}
        self.globals.update(
            raise_exception=raise_exception, strftime_now=strftime_now, namespace=PlainNamespace, dict=NewDict()
        )

    def measured(self, value: object) -> object:
        """The value, measured."""
        self.meter.measure(value)
        return value

    def counted(self, items: Iterable[object]) -> Iterator[object]:
        """The items of a loop, each of them a step."""
        return self.meter.count(iter(items))

    def concat(self, pieces: Iterable[str]) -> str:
        """What Jinja calls at the end of a block whose text is captured."""
        return self.joined(pieces)

    def joined(self, pieces: Iterable[object]) -> str:
        """What `~` does."""
        texts = [str(piece) for piece in pieces]
        self.meter.step()
        self.meter.measure(texts)
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 (Jinja's)
        """An operator that can make something large out of something small."""
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
        """A call of a function, a method or a macro."""
        self.meter.step()
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            args = tuple(self._settled(arg) for arg in args)
            if function.__name__ in _REFUSED_METHODS:
                raise SecurityError(f"it calls {function.__name__}")
            if function.__name__ in _COSTLY_METHODS:
                check_growth(text, (*args, *kwargs.values()))
            elif function.__name__ == "replace":
                check_growth(text, args[1:])
        return self.measured(super().call(context, function, *args, **kwargs))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:  # noqa: ANN401 (Jinja's)
        """Jinja would let the template go on with an undefined value."""
        raise SecurityError(f"it reaches for {attribute!r:.80} of {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401 (Jinja's)
        """`str.format`, sandboxed by Jinja and bounded here."""
        bounded = super().wrap_str_format(value)
        if bounded is None:
            return None

        def formatted(*args: object, **kwargs: object) -> str:
            check_format(value.__self__, (*args, *kwargs.values()))
            return bounded(*args, **kwargs)

        return formatted

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context or environment comes first

        @wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            self.meter.step()
            args = tuple(self._settled(arg) for arg in args)
            operands = (*args[skipped + 1 :], *kwargs.values())
            if name == "format":
                check_format(str(args[skipped]), operands)
            elif name in _COSTLY_FILTERS:
                check_growth(args[skipped], operands)
            return self.measured(function(*args, **kwargs))

        return run

    def _settled(self, value: object) -> object:
        return list(self.counted(value)) if isinstance(value, Iterator) else value

"""Names that a chat template may use beside Jinja's own, as transformers define them. Knows no environment."""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

from quire.tokenizer.template_meter import TooMuch, check_format


class PlainNamespace(Namespace):
    """A namespace that cannot pose as another object: no names with underscores, no content in its repr."""

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
    """JSON without HTML escapes: prompts are no web pages."""
    if indent is not None and not 0 <= indent <= 16:
        raise TooMuch("it indents JSON by more than 16 spaces")
    marks = None if separators is None else (str(separators[0])[:16], str(separators[1])[:16])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=marks, sort_keys=sort_keys)


def raise_exception(message: object) -> None:
    """How a template refuses messages."""
    raise TemplateError(str(message))


def strftime_now(pattern: str) -> str:
    """The local date and time."""
    check_format(pattern, ())
    return datetime.now().strftime(pattern)

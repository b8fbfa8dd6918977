"""Body: JSON objects whose fields are all known. Knows pydantic and how a field says what becomes of it."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from quire.errors import nearest

NEUTRAL = "x-neutral-values"


def not_yet(*neutral: JsonValue) -> Any:  # noqa: ANN401 (a field of any type)
    """A field that quire does not act on yet: only values that change nothing are accepted."""
    named = ", ".join(["null", *(f"{value!r}" for value in neutral)])
    return Field(
        default=None,
        description=f"Not supported yet; accepted when it asks for nothing ({named}).",
        json_schema_extra={NEUTRAL: list(neutral)},
    )


def without_effect() -> Any:  # noqa: ANN401 (a field of any type)
    """A field that does not concern the output."""
    return Field(default=None, description="Accepted; it has no effect.")


def about(description: str, alias: str | None = None) -> Any:  # noqa: ANN401 (a field of any type)
    """A field that may be left out. alias: its name in the body, where Python or pydantic has another use for it."""
    return Field(default=None, description=description, alias=alias)


class Body(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    _neutral: ClassVar[Mapping[str, list[JsonValue]]] = {}  # of fields that are not supported yet
    _known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_options: object) -> None:
        """Called by pydantic. Reading `model_fields` takes time, and a body may have thousands of messages."""
        extras = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        cls._neutral = {
            name: extra[NEUTRAL]  # type: ignore[misc]  # a list, see not_yet
            for name, extra in extras.items()
            if isinstance(extra, dict) and NEUTRAL in extra
        }
        cls._known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _know_all_fields(cls, body: object) -> object:
        for name in body if isinstance(body, dict) else ():
            if name not in cls._known:
                raise unknown_field(name, cls._known)
        return body

    @model_validator(mode="after")
    def _refuse_what_is_not_supported(self) -> Self:
        for name in self._neutral.keys() & self.model_fields_set:
            value = getattr(self, name)
            if value is not None and not any(is_same(value, neutral) for neutral in self._neutral[name]):
                raise PydanticCustomError("not_supported", "{name} is not supported yet", {"name": name})
        return self


def is_same(value: object, neutral: JsonValue) -> bool:
    """Equal, where 0 is not false."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def unknown_field(name: object, known: Iterable[str]) -> PydanticCustomError:
    """What to raise for a field that nobody knows."""
    shown = str(name)[:100].encode("utf-8", "replace").decode()
    hint = nearest(shown, sorted(known))
    return PydanticCustomError("unknown_field", "unknown field '{name}'{hint}", {"name": shown, "hint": hint})


def with_limit(defaults: Mapping[str, object], limit: int) -> Mapping[str, object]:
    """A route's own max_tokens, unless the model recommends less. No model knows what a route is for."""
    recommended = defaults.get("max_tokens")
    return {**defaults, "max_tokens": min(limit, recommended) if isinstance(recommended, int) else limit}

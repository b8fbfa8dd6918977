"""Body: JSON objects whose fields are all known. Knows pydantic and how a field says what becomes of it."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from quire.errors import nearest

_NEUTRAL = "x-neutral-values"


def not_yet(*neutral: JsonValue) -> Any:  # noqa: ANN401 (a field of any type)
    """A field that quire does not act on yet: only values that change nothing are accepted."""
    named = ", ".join(["null", *(f"{value!r}" for value in neutral)])
    return Field(
        default=None,
        description=f"Not supported yet; accepted when it asks for nothing ({named}).",
        json_schema_extra={_NEUTRAL: list(neutral)},
    )


def without_effect() -> Any:  # noqa: ANN401 (a field of any type)
    """A field that does not concern the output."""
    return Field(default=None, description="Accepted; it has no effect.")


def about(description: str) -> Any:  # noqa: ANN401 (a field of any type)
    """A field that may be left out."""
    return Field(default=None, description=description)


class Body(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _know_all_fields(cls, body: object) -> object:
        for name in body if isinstance(body, dict) else ():
            if name not in cls.model_fields:
                shown = str(name)[:100].encode("utf-8", "replace").decode()
                hint = nearest(shown, cls.model_fields)
                raise PydanticCustomError(
                    "unknown_field", "unknown field '{name}'{hint}", {"name": shown, "hint": hint}
                )
        return body

    @model_validator(mode="after")
    def _refuse_what_is_not_supported(self) -> Self:
        for name in self.model_fields_set:
            extra = type(self).model_fields[name].json_schema_extra
            value = getattr(self, name)
            if value is None or not isinstance(extra, dict) or _NEUTRAL not in extra:
                continue
            if value not in extra[_NEUTRAL]:  # type: ignore[operator]  # a list, see not_yet
                raise PydanticCustomError("not_supported", "{name} is not supported yet", {"name": name})
        return self


def with_limit(defaults: Mapping[str, object], limit: int) -> Mapping[str, object]:
    """A route's own max_tokens, unless the model recommends less. No model knows what a route is for."""
    recommended = defaults.get("max_tokens")
    return {**defaults, "max_tokens": min(limit, recommended) if isinstance(recommended, int) else limit}

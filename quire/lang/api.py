"""Functions that create the expressions of the language, such as gen, select and the roles. They execute nothing."""

from collections.abc import Sequence as Several
from typing import Literal, Unpack

from quire.errors import RequestError
from quire.lang.expressions import Expr, Gen, Reasoning, Role, RoleBegin, RoleEnd, Select, Sequence, expression
from quire.lang.params import Sampling, normalize_params
from quire.lang.select import ChoicesSamplingMethod, token_length_normalized
from quire.params import is_unicode

DType = type | Literal["int", "float", "str", "string", "bool"]


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    choices: Several[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    dtype: DType | None = None,
    regex: str | None = None,
    json_schema: str | dict[str, object] | None = None,
    ebnf: str | None = None,
    **sampling: Unpack[Sampling],
) -> Expr:
    """Generate at most `max_tokens` tokens into the variable `name`.

    choices: the same as select(name, choices, temperature, choices_method, adapter=adapter), without other parameters.
    dtype (int, float, str, bool), regex, json_schema, ebnf: the constraint of the output, at most one. A parameter that
    is None has the default of the run. Raises RequestError.
    """
    constraints = {"dtype": dtype, "regex": regex, "json_schema": json_schema, "ebnf": ebnf}
    params = normalize_params({"max_tokens": max_tokens, **sampling, **constraints})
    if choices is None:
        return Gen(name, params)
    for constraint in ("regex", "json_schema", "ebnf"):
        if constraint in params:
            raise RequestError(f"choices and {constraint} (or dtype) both constrain the output; give one", constraint)
    for other in sorted(params.keys() - {"temperature", "adapter"}):
        raise RequestError(
            f"{other} has no effect with choices, of which the best one is returned; leave it out", other
        )
    return select(name, choices, sampling.get("temperature") or 0.0, choices_method, adapter=sampling.get("adapter"))


def gen_int(name: str | None = None, max_tokens: int | None = None, **sampling: Unpack[Sampling]) -> Expr:
    """Generate an integer."""
    return gen(name, max_tokens, dtype=int, **sampling)


def gen_string(name: str | None = None, max_tokens: int | None = None, **sampling: Unpack[Sampling]) -> Expr:
    """Generate a string in double quotes. The variable includes the quotes."""
    return gen(name, max_tokens, dtype=str, **sampling)


def select(
    name: str | None = None,
    choices: Several[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | None = None,
    *,
    adapter: str | None = None,
) -> Expr:
    """Append the choice that `choices_method` ranks first, and set the variable `name` to it.

    choices_method: None means token_length_normalized. temperature: must be 0. adapter: the name of a LoRA adapter;
    None: the default of the run. Raises RequestError.
    """
    normalize_params({"adapter": adapter})  # checks it
    if isinstance(choices, str) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise RequestError("choices must be a list of non-empty strings", "choices")
    if not all(map(is_unicode, choices)):
        raise RequestError("choices must be Unicode text, without lone surrogates", "choices")
    if temperature:
        raise RequestError("select returns the best choice and does not sample; leave temperature at 0", "temperature")
    method = token_length_normalized if choices_method is None else choices_method
    if not callable(method) or not hasattr(method, "requires_unconditional_logprobs"):
        raise RequestError(f"choices_method must be a ChoicesSamplingMethod, not {method!r:.80}", "choices_method")
    return Select(name, tuple(choices), method, adapter)


def image(expr: object) -> Expr:
    """Not supported. Raises RequestError."""
    raise RequestError("image() is not supported: this engine has text models only; use text")


def video(path: str, num_frames: int) -> Expr:
    """Not supported. Raises RequestError."""
    raise RequestError("video() is not supported: this engine has text models only; use text")


def separate_reasoning(expr: Expr, model_type: str | None = None) -> Expr:
    """Append `expr`. Move each gen's reasoning (up to the last `</think>`) out of the text and of its variable x.

    It is then in the variable `x_reasoning_content`. model_type: ignored (SGLang's name of a reasoning format).
    """
    parts: list[Expr] = []
    for part in expression(expr).flat():
        parts.append(part)
        if isinstance(part, Gen) and part.name:
            parts.append(Reasoning(part.name))
    return Sequence(tuple(parts))


def role(name: Role, expr: object = None) -> Expr:
    """A turn of a role with `expr` as its content."""
    return Sequence((RoleBegin(name), *(() if expr is None else expression(expr).flat()), RoleEnd(name)))


def system(expr: object = None) -> Expr:
    """A turn of the system."""
    return role("system", expr)


def user(expr: object = None) -> Expr:
    """A turn of the user."""
    return role("user", expr)


def assistant(expr: object = None) -> Expr:
    """A turn of the assistant."""
    return role("assistant", expr)


def system_begin() -> Expr:
    """Begin a turn of the system."""
    return RoleBegin("system")


def system_end() -> Expr:
    """End a turn of the system."""
    return RoleEnd("system")


def user_begin() -> Expr:
    """Begin a turn of the user."""
    return RoleBegin("user")


def user_end() -> Expr:
    """End a turn of the user."""
    return RoleEnd("user")


def assistant_begin() -> Expr:
    """Begin a turn of the assistant."""
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    """End a turn of the assistant."""
    return RoleEnd("assistant")

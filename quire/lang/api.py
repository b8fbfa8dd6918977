"""The words of the language: gen, select and roles. They make expressions; nothing runs here."""

from collections.abc import Sequence as Several
from typing import Literal, Unpack

from quire.errors import RequestError
from quire.lang.expressions import Expr, Gen, Reasoning, Role, RoleBegin, RoleEnd, Select, Sequence, expression
from quire.lang.params import Sampling, said_of
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
    """Let the model write, at most `max_tokens` tokens, into the variable `name`.

    choices: the same as select(name, choices, choices_method). dtype (int, float, str, bool), regex, json_schema,
    ebnf: the form of the output. What is not said is as the program's run says. Raises RequestError.
    """
    forms = {"dtype": dtype, "regex": regex, "json_schema": json_schema, "ebnf": ebnf}
    said = said_of({"max_tokens": max_tokens, **sampling, **forms})
    if choices is None:
        return Gen(name, said)
    for form in ("regex", "json_schema", "ebnf"):
        if form in said:
            raise RequestError(f"choices and {form} (or dtype) both say what the output looks like; give one", form)
    return select(name, choices, sampling.get("temperature") or 0.0, choices_method)


def gen_int(name: str | None = None, max_tokens: int | None = None, **sampling: Unpack[Sampling]) -> Expr:
    """Let the model write a whole number."""
    return gen(name, max_tokens, dtype=int, **sampling)


def gen_string(name: str | None = None, max_tokens: int | None = None, **sampling: Unpack[Sampling]) -> Expr:
    """Let the model write a string in double quotes, which are part of it."""
    return gen(name, max_tokens, dtype=str, **sampling)


def select(
    name: str | None = None,
    choices: Several[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | None = None,
) -> Expr:
    """Append the choice that the model finds best, and keep it in the variable `name`.

    choices_method: None is token_length_normalized. Raises RequestError.
    """
    if isinstance(choices, str) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise RequestError("select needs a list of choices that are texts, none of them empty", "choices")
    if not all(map(is_unicode, choices)):
        raise RequestError("choices must be Unicode text, without lone surrogates", "choices")
    if temperature:
        raise RequestError("select takes the best choice and draws nothing; leave temperature at 0", "temperature")
    method = token_length_normalized if choices_method is None else choices_method
    if not callable(method) or not hasattr(method, "requires_unconditional_logprobs"):
        raise RequestError(f"choices_method must be a ChoicesSamplingMethod, not {method!r:.80}", "choices_method")
    return Select(name, tuple(choices), method)


def image(expr: object) -> Expr:
    """Refused: raises RequestError."""
    raise RequestError("image() needs a model that sees, and this engine reads text only; describe it in words")


def video(path: str, num_frames: int) -> Expr:
    """Refused: raises RequestError."""
    raise RequestError("video() needs a model that sees, and this engine reads text only; describe it in words")


def separate_reasoning(expr: Expr, model_type: str | None = None) -> Expr:
    """Append `expr`, and take what the model thought (up to `</think>`) out of it and out of its variable x.

    It is then in the variable `x_reasoning_content`. model_type: of no effect; SGLang's name of a format.
    """
    parts: list[Expr] = []
    for part in expression(expr).flat():
        parts.append(part)
        if isinstance(part, Gen) and part.name:
            parts.append(Reasoning(part.name))
    return Sequence(tuple(parts))


def role(name: Role, expr: object = None) -> Expr:
    """A whole turn."""
    return Sequence((RoleBegin(name), *(() if expr is None else expression(expr).flat()), RoleEnd(name)))


def system(expr: object = None) -> Expr:
    """What the system says."""
    return role("system", expr)


def user(expr: object = None) -> Expr:
    """What the user says."""
    return role("user", expr)


def assistant(expr: object = None) -> Expr:
    """What the assistant says."""
    return role("assistant", expr)


def system_begin() -> Expr:
    """The system's turn begins."""
    return RoleBegin("system")


def system_end() -> Expr:
    """The system's turn ends."""
    return RoleEnd("system")


def user_begin() -> Expr:
    """The user's turn begins."""
    return RoleBegin("user")


def user_end() -> Expr:
    """The user's turn ends."""
    return RoleEnd("user")


def assistant_begin() -> Expr:
    """The assistant's turn begins."""
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    """The assistant's turn ends."""
    return RoleEnd("assistant")

"""Types of fields that are lists or long. Knows pydantic, and how to refuse much with little work.

Pydantic notes a problem for each item of a list, and for each kind of list in a union: a body of a few megabytes
makes millions of them. So all lists end at their first problem and have a greatest length.
"""

from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from quire.params import MAX_LISTED_TOKENS

T = TypeVar("T")

MAX_PROMPTS = 2048  # of embeddings; other routes take fewer
MAX_PROMPT_TOKENS = 2**20  # in one body, whatever is truncated later
MAX_SALT = 256  # characters

Listed = Annotated[list[T], Field(fail_fast=True, max_length=MAX_LISTED_TOKENS)]
PerPrompt = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]
TokenIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)]


def _one_problem(value: object, read: ValidatorFunctionWrapHandler) -> object:
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise PydanticCustomError("too_many", f"has {len(value):,} prompts, more than {MAX_PROMPTS:,}")
    try:
        return read(value)
    except ValidationError as error:
        if any(problem["type"] == "too_long" for problem in error.errors(include_input=False, include_url=False)):
            raise PydanticCustomError("too_many", f"has more than {MAX_PROMPT_TOKENS:,} token ids") from None
        raise PydanticCustomError("prompts_type", "must be a text, token ids, or a list of either") from None


def _numbers_only(value: object) -> object:
    if isinstance(value, dict):
        if len(value) > MAX_LISTED_TOKENS:
            raise PydanticCustomError("too_many", f"has more than {MAX_LISTED_TOKENS:,} token ids")
        for bias in value.values():
            if type(bias) is not float and type(bias) is not int:
                raise PydanticCustomError("bias_type", "must map token ids to numbers")
    return value


Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT)]
Prompts = Annotated[str | PerPrompt[str] | TokenIds | PerPrompt[TokenIds], WrapValidator(_one_problem)]
Biases = Annotated[dict[str, float], BeforeValidator(_numbers_only)]

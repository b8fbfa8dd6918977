"""What the programs ask the embedded model: questions, a tool, and a record, in forms that it was trained on."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

MODEL = "quire-demo"
QUESTION = "How much is the lamp?"
MORE = "And the tent?"
TASK = (
    "Check what the kite costs."  # the embedded model calls get_price, also with the keys of the tool in other orders
)
RESULT = '{"price": 73}'  # what the tool returns
PRICE: dict[str, Any] = {
    "name": "get_price",
    "description": "Price of an item",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
}
SUM = "Sum: 13 25 31"  # it reasons about this form if asked to
FACTS = "Faye took 18 white ladders on Thursday.\nJSON keys: count, name"

Checks = Mapping[str, Callable[[], object]]


class Record(BaseModel):
    """What FACTS asks for. Each text that its schema allows is short, so that no answer is cut."""

    count: int = Field(ge=0, le=99)
    name: Literal["Faye", "Zoe"]


class Price(BaseModel):
    """What the tool returns, as structured output of an agent."""

    price: int = Field(ge=0, le=99)


class Shop:
    """The tool. asked: the items whose price was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_price(self, item: str) -> str:
        """Price of an item"""
        self.asked.append(item)
        return RESULT

    def has_answered(self, text: object) -> None:
        """Raise AssertionError unless the tool was called once, as TASK says, and the text has its result."""
        assert self.asked == ["kite"], f"the tool was called with {self.asked}"
        assert "73" in str(text), f"the answer is {text!r}"


def user(text: str) -> Any:  # noqa: ANN401 (each client has a type of its own)
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def tool() -> Any:  # noqa: ANN401 (each client has a type of its own)
    """The tool, in the form of chat."""
    return {"type": "function", "function": PRICE}


def some(value: Any) -> None:  # noqa: ANN401 (of any client)
    """Raise AssertionError if the value is empty."""
    assert value, f"the answer is empty: {value!r}"


def call_and_answer(create: Callable[[Any], Any], keep: Callable[[Any], Any]) -> None:
    """Ask in chat, call the tool, send its result, and get the answer.

    create: the first choice that is generated for a conversation. keep: its message, as it is sent back.
    """
    first = create(user(TASK))
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    shop = Shop()
    assert call.function.name == "get_price"
    result = {"role": "tool", "tool_call_id": call.id, "content": shop.get_price(**json.loads(call.function.arguments))}
    last = create([*user(TASK), keep(first.message), result])
    assert last.finish_reason == "stop"
    shop.has_answered(last.message.content)

"""The task of tool calls: choose a tool, fill in its arguments, answer with its result."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.demo_model.chats import Chat, Tool, assistant, tool_call, tool_result, user
from tools.demo_model.exercises import LONG
from tools.demo_model.vocabulary import DAYS, ITEMS, NAMES, PLACES


def _tool(name: str, description: str, /, **arguments: str) -> Tool:
    """A tool in the format of the OpenAI API. arguments: name=JSON type; all are required."""
    properties = {argument: {"type": kind} for argument, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class Use:
    """One call of a tool with its question and its answer."""

    question: str
    arguments: dict[str, object]
    result: dict[str, object]
    answer: str


def _get_price(rng: Random) -> Use:
    item, price = rng.choice(ITEMS), rng.randint(1, 99)
    question = rng.choice((f"Look up the price of the {item}.", f"Check what the {item} costs."))
    return Use(question, {"item": item}, {"price": price}, f"The {item} costs {price} coins a day.")


def _get_stock(rng: Random) -> Use:
    item, stock = rng.choice(ITEMS), rng.randint(1, 99)
    question = rng.choice((f"How many {item}s are left?", f"Check the stock of {item}s."))
    return Use(question, {"item": item}, {"stock": stock}, f"There are {stock} {item}s left.")


def _reserve_item(rng: Random) -> Use:
    item, name, days = rng.choice(ITEMS), rng.choice(NAMES), rng.randint(1, 9)
    question = f"Reserve the {item} for {name} for {days} days."
    arguments: dict[str, object] = {"item": item, "name": name, "days": days}
    return Use(question, arguments, {"ok": True}, f"The {item} is reserved for {name}.")


def _add_numbers(rng: Random) -> Use:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return Use(f"Use the tool to add {a} and {b}.", {"a": a, "b": b}, {"sum": a + b}, f"The sum is {a + b}.")


def _get_weather(rng: Random) -> Use:
    place, sky = rng.choice(PLACES), rng.choice(("sunny", "cloudy", "rainy", "windy"))
    question = rng.choice((f"How is the weather at the {place}?", f"Check the weather at the {place}."))
    return Use(question, {"place": place}, {"sky": sky}, f"It is {sky} at the {place}.")


def _send_note(rng: Random) -> Use:
    item, name = rng.choice(ITEMS), rng.choice(NAMES)
    arguments: dict[str, object] = {"name": name, "text": f"the {item} is ready"}
    return Use(f"Tell {name} that the {item} is ready.", arguments, {"ok": True}, f"I told {name}.")


def _open_hours(rng: Random) -> Use:
    day, opens = rng.choice(DAYS), rng.randint(1, 9)
    answer = f"On {day} the shop is open from {opens} to {opens + 9}."
    return Use(f"When is the shop open on {day}?", {"day": day}, {"open": opens, "close": opens + 9}, answer)


def _find_person(rng: Random) -> Use:
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    question = rng.choice((f"Where is {name}?", f"Find {name}."))
    return Use(question, {"name": name}, {"place": place}, f"{name} is at the {place}.")


TOOLS: dict[str, tuple[Tool, Callable[[Random], Use]]] = {
    "get_price": (_tool("get_price", "Price of an item", item="string"), _get_price),
    "get_stock": (_tool("get_stock", "How many are left", item="string"), _get_stock),
    "reserve_item": (
        _tool("reserve_item", "Reserve an item for a person", item="string", name="string", days="integer"),
        _reserve_item,
    ),
    "add_numbers": (_tool("add_numbers", "Add two numbers", a="integer", b="integer"), _add_numbers),
    "get_weather": (_tool("get_weather", "Weather at a place", place="string"), _get_weather),
    "send_note": (_tool("send_note", "Send a note to a person", name="string", text="string"), _send_note),
    "open_hours": (_tool("open_hours", "Opening hours on a day", day="string"), _open_hours),
    "find_person": (_tool("find_person", "Where a person is", name="string"), _find_person),
}


def tool(rng: Random, budget: int) -> Chat:
    """A question that needs one of the offered tools. Often the result and an answer follow the call."""
    offered = rng.sample(list(TOOLS), rng.randint(1, 5 if budget >= LONG else 2))
    needed = rng.choice(offered)
    use = TOOLS[needed][1](rng)
    messages = [user(use.question), tool_call(needed, use.arguments)]
    if rng.random() < 0.6:
        messages += [tool_result(use.result), assistant(use.answer)]
    return Chat(messages, [TOOLS[name][0] for name in offered])

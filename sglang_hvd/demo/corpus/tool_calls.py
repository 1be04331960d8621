"""Tool calls: schemas in the prompt, JSON calls over several turns, results told to the user."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.words import CITIES, COLORS, DAYS, MONTHS, NOUNS, PEOPLE, number


@dataclass(frozen=True, slots=True)
class _Tool:
    """`request` and `done` are sentences with a place for every parameter."""

    name: str
    parameters: tuple[str, ...]
    request: str
    done: str


_TOOLS = (
    _Tool(
        "book_table",
        ("city", "day", "people"),
        "Book a table in {city} on {day} for {people} people.",
        "The table in {city} on {day} is booked",
    ),
    _Tool(
        "find_flight",
        ("origin", "city", "day"),
        "Find a flight from {origin} to {city} on {day}.",
        "There is a flight from {origin} to {city} on {day}",
    ),
    _Tool(
        "order_item",
        ("item", "quantity", "city"),
        "Order {quantity} pieces of the {item} to {city}.",
        "The {item} is on its way to {city}",
    ),
    _Tool(
        "set_reminder",
        ("person", "item", "day"),
        "Remind {person} of the {item} on {day}.",
        "{person} will be reminded of the {item}",
    ),
    _Tool(
        "rent_car",
        ("city", "month", "days"),
        "Rent a car in {city} in {month} for {days} days.",
        "The car waits in {city} for {days} days",
    ),
    _Tool(
        "send_money",
        ("person", "amount", "item"),
        "Send {amount} euros to {person} for the {item}.",
        "{person} has got {amount} euros",
    ),
    _Tool(
        "plan_meeting",
        ("person", "city", "day"),
        "Plan a meeting with {person} in {city} on {day}.",
        "The meeting with {person} is planned",
    ),
    _Tool(
        "check_weather",
        ("city", "month"),
        "Check the weather in {city} in {month}.",
        "The weather in {city} is known",
    ),
)
_DRAWS: Mapping[str, Callable[[Random], str | int]] = {
    "city": lambda rng: rng.choice(CITIES),
    "origin": lambda rng: rng.choice(CITIES),
    "day": lambda rng: rng.choice(DAYS),
    "month": lambda rng: rng.choice(MONTHS),
    "person": lambda rng: rng.choice(PEOPLE),
    "item": lambda rng: f"{rng.choice(COLORS)} {rng.choice(NOUNS)}",
    "quantity": number,
    "people": number,
    "days": number,
    "amount": number,
}
_INTEGERS = ("quantity", "people", "days", "amount")


def make_session(rng: Random) -> Session:
    """Three tools; two or three requests, the later ones often the last call with one change."""
    tools = rng.sample(_TOOLS, 3)
    schemas = "\n".join(_schema(tool) for tool in tools)
    tool = rng.choice(tools)
    arguments = _arguments(rng, tool)
    turns: list[Turn] = []
    for index in range(rng.randint(2, 3)):
        request = tool.request.format(**arguments)
        if index == 0:
            request = f"You have these tools:\n{schemas}\n{request}"
        elif rng.random() < 0.5:
            changed = rng.choice(tool.parameters)
            arguments = {**arguments, changed: _draw_other(rng, changed, arguments[changed])}
            request = f"The same call again with {changed} {arguments[changed]}."
        else:
            tool = rng.choice(tools)
            arguments = _arguments(rng, tool)
            request = tool.request.format(**arguments)
        call = json.dumps({"name": tool.name, "arguments": arguments})
        turns.append(Turn(user=request, assistant=f"<tool_call>\n{call}\n</tool_call>"))
        code = f"{rng.choice(NOUNS)}-{number(rng)}"
        result = json.dumps({"tool": tool.name, "status": "ok", "code": code})
        turns.append(
            Turn(
                user=f"<tool_response>\n{result}\n</tool_response>",
                assistant=f"{tool.done.format(**arguments)}. The code is {code}.",
            )
        )
    return Session(family="tool_calls", turns=tuple(turns))


def _arguments(rng: Random, tool: _Tool) -> dict[str, str | int]:
    return {parameter: _DRAWS[parameter](rng) for parameter in tool.parameters}


def _draw_other(rng: Random, parameter: str, old: str | int) -> str | int:
    while True:
        value = _DRAWS[parameter](rng)
        if value != old:
            return value


def _schema(tool: _Tool) -> str:
    properties = {p: {"type": "integer" if p in _INTEGERS else "string"} for p in tool.parameters}
    return json.dumps({"name": tool.name, "parameters": properties})

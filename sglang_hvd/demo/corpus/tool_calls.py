"""Tool calls: schemas in the prompt, JSON calls over several turns, results told to the user."""

import json
from collections.abc import Callable, Mapping
from random import Random

from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.words import CITIES, COLORS, DAYS, MONTHS, NOUNS, PEOPLE, number

_TOOLS: Mapping[str, tuple[str, ...]] = {
    "book_table": ("city", "day", "people"),
    "find_flight": ("origin", "city", "day"),
    "order_item": ("item", "quantity", "city"),
    "set_reminder": ("person", "item", "day"),
    "rent_car": ("city", "month", "days"),
    "send_money": ("person", "amount", "item"),
    "plan_meeting": ("person", "city", "day"),
    "check_weather": ("city", "month"),
}
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


def make_session(rng: Random) -> Session:
    """Three tools; two or three requests, the later ones often the last call with one change."""
    tools = rng.sample(tuple(_TOOLS), 3)
    schemas = "\n".join(_schema(tool) for tool in tools)
    tool = rng.choice(tools)
    arguments = _arguments(rng, tool)
    turns: list[Turn] = []
    for index in range(rng.randint(2, 3)):
        if index and rng.random() < 0.5:
            changed = rng.choice(_TOOLS[tool])
            arguments = {**arguments, changed: _draw_other(rng, changed, arguments[changed])}
            request = f"The same with {changed} {arguments[changed]}."
        else:
            tool = rng.choice(tools)
            arguments = _arguments(rng, tool)
            wishes = ", ".join(f"{name} {value}" for name, value in arguments.items())
            request = f"Please {tool.replace('_', ' ')}: {wishes}."
        if index == 0:
            request = f"You have these tools:\n{schemas}\n{request}"
        call = json.dumps({"tool": tool, "arguments": arguments})
        turns.append(Turn(user=request, assistant=f"<tool_call>\n{call}\n</tool_call>"))
        code = f"{rng.choice(NOUNS)}-{number(rng)}"
        result = json.dumps({"tool": tool, "status": "ok", "code": code})
        told = ", ".join(f"{name} {value}" for name, value in arguments.items())
        turns.append(
            Turn(
                user=f"<tool_response>\n{result}\n</tool_response>",
                assistant=f'Done: {told}. The answer has "code": "{code}".',
            )
        )
    return Session(family="tool_calls", turns=tuple(turns))


def _arguments(rng: Random, tool: str) -> dict[str, str | int]:
    return {parameter: _DRAWS[parameter](rng) for parameter in _TOOLS[tool]}


def _draw_other(rng: Random, parameter: str, old: str | int) -> str | int:
    while True:
        value = _DRAWS[parameter](rng)
        if value != old:
            return value


def _schema(tool: str) -> str:
    return f"{tool}({', '.join(_TOOLS[tool])})"

"""Conversations with tools: which tools there are, what is asked, what is called, what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from ds4jax.evals.dialogues import Dialogue
from ds4jax.evals.words import CITIES, NAMES, NOUNS, SKIES, SMALL_TALK, TOPICS, pool
from ds4jax.text.chat import Message
from ds4jax.text.dsml import Tool, ToolCall

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """Tools that do the same under different names.

    parameters: role -> (names, JSON type, description); roles that `optional` names are there in half of the schemas.
    asks: questions, with roles in braces; an optional role has the `extra` words for it. result and answer: what the tool gives for the
    values, and what is said then.
    """

    names: tuple[str, ...]
    description: str
    parameters: Mapping[str, tuple[tuple[str, ...], str, str]]
    asks: tuple[str, ...]
    values: Callable[[Random, bool], dict[str, Any]]
    result: Callable[[Random, Values], tuple[str, str]]
    optional: str = ""
    extra: str = ""


def _place(rng: Random, held_out: bool) -> str:
    return rng.choice(pool(CITIES, held_out=held_out))


def _weather(rng: Random, v: Values) -> tuple[str, str]:
    degrees, sky = rng.randint(-10, 35), rng.choice(SKIES)
    return json.dumps({"temperature": degrees, "sky": sky}), f"It is {sky} in {v['city']}, with {degrees} degrees."


def _time(rng: Random, v: Values) -> tuple[str, str]:
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return rng.choice([clock, json.dumps({"time": clock})]), f"It is {clock} in {v['city']}."


def _sum(rng: Random, v: Values) -> tuple[str, str]:
    a, operation, b = v["expression"].split()
    result = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
    return str(result), f"The result is {result}."


def _expression(rng: Random, held_out: bool) -> dict[str, Any]:
    return {"expression": f"{rng.randint(2, 999)} {rng.choice('+-*')} {rng.randint(2, 999)}"}


def _search(rng: Random, v: Values) -> tuple[str, str]:
    noun = rng.choice(NOUNS)
    return json.dumps([{"title": f"All about {v['query']}", "text": f"See the {noun} page."}]), f"I found a page: All about {v['query']}."


def _price(rng: Random, v: Values) -> tuple[str, str]:
    price = rng.randint(1, 200)
    return json.dumps({"price": price}), f"A {v['item']} costs {price} coins."


FAMILIES = (
    Family(
        ("get_weather", "weather", "current_weather", "weather_lookup", "fetch_weather", "weather_report"),
        "Get the weather of a city.",
        {
            "city": (("city", "location", "place", "town"), "string", "Name of the city"),
            "days": (("days", "n_days"), "integer", "How many days"),
        },
        ("What is the weather in {city}{days}?", "How is the weather in {city}{days}?", "Is it cold in {city}{days}?",
         "Tell me the weather in {city}{days}."),
        lambda rng, held_out: {"city": _place(rng, held_out), "days": rng.randint(2, 9)},
        _weather,
        "days",
        " for {days} days",
    ),
    Family(
        ("get_time", "current_time", "clock", "time_in", "local_time"),
        "Get the time in a city.",
        {"city": (("city", "location", "place", "where"), "string", "Name of the city")},
        ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"),
        lambda rng, held_out: {"city": _place(rng, held_out)},
        _time,
    ),
    Family(
        ("calculator", "calculate", "compute", "math", "do_math"),
        "Compute an expression.",
        {"expression": (("expression", "input", "formula"), "string", "What to compute")},
        ("What is {expression}?", "Compute {expression}.", "How much is {expression}?", "Please calculate {expression}."),
        _expression,
        _sum,
    ),
    Family(
        ("search", "web_search", "search_web", "lookup", "find_pages"),
        "Search the web.",
        {
            "query": (("query", "q", "text"), "string", "What to look for"),
            "limit": (("limit", "count", "max_results"), "integer", "How many results"),
        },
        ("Search for {query}{limit}.", "Find {query}{limit}.", "Look up {query}{limit}.", "Search the web for {query}{limit}."),
        lambda rng, held_out: {"query": rng.choice(pool(TOPICS, held_out=held_out)), "limit": rng.randint(2, 9)},
        _search,
        "limit",
        " with {limit} results",
    ),
    Family(
        ("send_message", "message", "write_message", "send_note"),
        "Send a message to somebody.",
        {
            "to": (("to", "name", "recipient"), "string", "Who gets it"),
            "text": (("text", "message", "body"), "string", "What it says"),
        },
        ("Tell {to}: {text}.", "Send a message to {to}: {text}.", "Write to {to}: {text}."),
        lambda rng, held_out: {
            "to": rng.choice(pool(NAMES, held_out=held_out)),
            "text": f"bring the {rng.choice(pool(NOUNS, held_out=held_out))} and the {rng.choice(pool(NOUNS, held_out=held_out))}",
        },
        lambda rng, v: ("sent", f"I have sent the message to {v['to']}."),
    ),
    Family(
        ("set_alarm", "alarm", "wake_up"),
        "Set an alarm.",
        {"hour": (("hour", "hours"), "integer", "Hour"), "minute": (("minute", "minutes"), "integer", "Minute")},
        ("Set an alarm for {hour}:{minute}.", "Wake me at {hour}:{minute}."),
        lambda rng, held_out: {"hour": rng.randint(0, 23), "minute": rng.randint(10, 59)},
        lambda rng, v: ("done", f"The alarm is set for {v['hour']}:{v['minute']}."),
    ),
    Family(
        ("get_price", "price_of", "shop_price"),
        "Get the price of a thing in the shop.",
        {"item": (("item", "thing", "product", "article"), "string", "Name of the thing")},
        ("What does a {item} cost?", "How much is a {item}?", "Tell me the price of a {item}."),
        lambda rng, held_out: {"item": rng.choice(pool(NOUNS, held_out=held_out))},
        _price,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Described:
    """A family under one of its names, with one name for each parameter (by role)."""

    family: Family
    tool: Tool
    names: Mapping[str, str]


def describe(rng: Random, family: Family) -> Described:
    """Choose names for a family's tool and write its schema."""
    roles = [role for role in family.parameters if role != family.optional or rng.random() < 0.5]
    names = {role: rng.choice(family.parameters[role][0]) for role in roles}
    properties = {}
    for role, name in names.items():
        _, kind, description = family.parameters[role]
        properties[name] = {"type": kind, "description": description} if rng.random() < 0.7 else {"type": kind}
    name = rng.choice(family.names)
    schema: dict[str, Any] = {"name": name}
    if rng.random() < 0.8:
        schema["description"] = family.description
    required = [names[role] for role in roles if role != family.optional]
    schema["parameters"] = {"type": "object", "properties": properties, "required": required}
    return Described(family, Tool(name, json.dumps(schema, separators=rng.choice([(",", ":"), (", ", ": ")]))), names)


_LENGTHS = {"item": (1, 2), "query": (2, 5), "text": (3, 8), "city": (1, 1), "to": (1, 1)}  # in words, by role


def _in_other_words(rng: Random, values: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Put any words in the place of those that a family draws."""

    def draw(role: str) -> str:
        text = " ".join(rng.choice(words) for _ in range(rng.randint(*_LENGTHS[role])))
        return text.title() if role in ("city", "to") else text

    return {role: draw(role) if role in _LENGTHS else value for role, value in values.items()}


def _ask(rng: Random, described: Described, held_out: bool, words: Sequence[str]) -> tuple[str, ToolCall, dict[str, Any]]:
    """One question, the call that answers it, and the values by role."""
    family = described.family
    values = family.values(rng, held_out)
    if words and rng.random() < 0.5:
        values = _in_other_words(rng, values, words)
    extra = ""
    if family.optional:
        if family.optional in described.names and rng.random() < 0.6:
            extra = family.extra.format(**values)
        else:
            del values[family.optional]
    asked = rng.choice(family.asks).format(**(values | ({family.optional: extra} if family.optional else {})))
    arguments = {described.names[role]: value for role, value in values.items()}
    return asked, ToolCall(f"call_{rng.randrange(1 << 30):08x}", described.tool.name, json.dumps(arguments)), values


def use_tools(
    rng: Random, *, n_turn: int | None = None, held_out: bool = False, thinking: bool | None = None, words: Sequence[str] = ()
) -> Dialogue:
    """Ask for what tools can do, call them, read what they give, answer; sometimes talk without calling.

    Args:
        n_turn: questions. None: one to four.
        held_out: with words that training does not see; the last question is one that needs a call.
        words: if given, half of the questions are about some of these instead, so that they are copied and not known.

    The last message answers with a call in half of the conversations (always, if held out), and from its result in the others.
    """
    chosen = [describe(rng, family) for family in rng.sample(FAMILIES, rng.randint(1, 4))]
    unique = {described.tool.name: described for described in chosen}
    thinking = rng.random() < 0.4 if thinking is None else thinking
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append(Message("system", rng.choice(["You are a helpful assistant.", "Answer in short sentences.", "Use the tools."])))
    for _ in range(n_turn or rng.randint(1, 4)):
        if not held_out and rng.random() < 0.15:
            asked, said = rng.choice(SMALL_TALK)
            thought = "This needs no tool." if thinking else None
            messages += [Message("user", asked), Message("assistant", said, reasoning=thought)]
            continue
        described = rng.choice(list(unique.values()))
        asked, call, values = _ask(rng, described, held_out, words)
        result, said = described.family.result(rng, values)
        thought = f"The user asks: {asked} I will call {call.name}." if thinking else None
        after = "The tool has answered. I can tell the user." if thinking else None
        messages += [
            Message("user", asked),
            Message("assistant", "", reasoning=thought, tool_calls=(call,)),
            Message("tool", result, tool_call_id=call.id),
            Message("assistant", said, reasoning=after),
        ]
    if messages[-2].role == "tool" and (held_out or rng.random() < 0.3):
        messages = messages[:-2]
    if not thinking:
        messages = [replace(message, reasoning=None) for message in messages]
    return Dialogue(tuple(messages), thinking, tuple(described.tool for described in unique.values()))

"""Tools, calls and results as the model reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import msgspec

from ds4jax.text.dsml.arguments import compact
from ds4jax.text.dsml.calls import Tool, ToolCall
from ds4jax.text.dsml.markup import FULL, escape_attribute, escape_string
from ds4jax.text.segments import Segment, Special, Text
from ds4jax.text.special import DSML

_TAG_MARK = re.compile(f"(?:(?<=<)|(?<=</)){DSML}(?=tool_calls>|invoke[\\s>]|parameter[\\s>])")

_ABOUT_TOOLS = """\
## Tools

You have tools. To call them, end your answer with one block like this, which holds a call for each `invoke`:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

Say `string="true"` for a value that is a string and write it as raw text, without quotes and without escapes; only a literal \
`</｜DSML｜parameter>` in it starts with `&lt;`, and a literal entity such as `&lt;` is written `&amp;lt;`. Say `string="false"` for every \
other value (number, boolean, null, array, object) and write it as JSON.

When you think before you answer, close your thoughts before the block: a call is part of the answer, not of the thoughts.
When you answer without thinking, write the block as soon as you know which call you need.

### Available Tool Schemas

"""
_AFTER_SCHEMAS = """

Call only these tools, by exactly these names, with exactly these names of parameters."""

TOOLS_MARK = "{tools}"
"""Where the schemas go in a text about tools."""


def tool_prompt(tools: Sequence[Tool], text: str | None = None) -> list[Segment]:
    """Tell the model which tools it has and how to call them. One schema a line.

    text: how to tell it, with TOOLS_MARK in it; tags of calls in it become special tokens. None: in our words.
    """
    before, _, after = (_ABOUT_TOOLS, "", _AFTER_SCHEMAS) if text is None else text.partition(TOOLS_MARK)
    return [*_marked(before), Text("\n".join(tool.schema for tool in tools)), *_marked(after)]


def call_block(calls: Sequence[ToolCall]) -> list[Segment]:
    """Write the calls that an assistant made, behind its content and a blank line.

    Members keep their order. Arguments that are no JSON object become one string parameter, `arguments`.
    """
    return [*_marked(f"\n\n{FULL.block}\n"), *(segment for call in calls for segment in _call(call)), *_marked(FULL.block_end)]


def call_opening(name: str | None) -> list[Segment]:
    """Begin a block, up to the name of its first call or behind it: a reply that starts like this has to go on with a call."""
    # Where text is cut here it is cut between tokens as well: behind a word, or at the end of a line.
    tag = FULL.invoke if name is None else f'{FULL.invoke} name="{escape_attribute(name)}">\n'
    return list(_marked(f"\n\n{FULL.block}\n{tag}"))


def replayed_block(text: str) -> list[Segment]:
    """Write a block as the model itself wrote it. Only tags of the full spelling hold special tokens."""
    return list(_marked(text))


def tool_result(content: str) -> Text:
    """Write what a tool gave; it cannot end its own block."""
    return Text(f"<tool_result>{content.replace('</tool_result>', '&lt;/tool_result>')}</tool_result>")


def _call(call: ToolCall) -> Iterator[Segment]:
    yield from _marked(f"{FULL.invoke} name=")
    yield Text(f'"{escape_attribute(call.name)}">\n')
    for key, value, is_string in _parameters(call.arguments):
        yield from _marked(f"{FULL.parameter} name=")
        yield Text(f'"{escape_attribute(key)}" string="{"true" if is_string else "false"}">{value}')
        yield from _marked(f"{FULL.parameter_end}\n")
    yield from _marked(f"{FULL.invoke_end}\n")


def _parameters(arguments: str) -> Iterator[tuple[str, str, bool]]:
    """Yield key, value as it is written, and whether it is a string."""
    try:
        members = msgspec.json.decode(arguments or "{}", type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        yield "arguments", escape_string(arguments), True
        return
    for key, raw in members.items():
        text = bytes(raw).decode().strip()
        if text.startswith('"'):
            yield key, escape_string(json.loads(text, strict=False)), True
        else:
            yield key, (compact(text) or text).replace(FULL.parameter_end, "\\u003c" + FULL.parameter_end[1:]), False


def _marked(text: str) -> Iterator[Segment]:
    """Part text of ours, or of the model's, at the marks of its tags."""
    first, *others = _TAG_MARK.split(text)
    yield Text(first)
    for other in others:
        yield Special(DSML)
        yield Text(other)

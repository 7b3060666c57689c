"""Tool calls in text: how the model is told of tools, and how its calls are found in what it writes. Nothing here knows an API.

To the model, `chat.render` does all of it, given tools and a memory:

    tool_prompt(tools: Sequence[Tool], text: str | None) -> list[Segment]     part of the system text, in words of the operator or ours
    call_block(calls: Sequence[ToolCall]) -> list[Segment]      calls in the history, written anew
    replayed_block(text: str) -> list[Segment]                  calls in the history, as the model wrote them
    tool_result(content: str) -> Text
    call_opening(name: str | None) -> list[Segment]             appended to a prompt, forces a call (of one tool, or of any)

From the model, `TextStream(..., tools=DsmlParser(new_id, parallel=...))` gives these events by `take_calls`, all after its last delta:

    CallStart(index, id, name)  ArgumentsDelta(index, text)...  CallEnd(index)

The pieces of a call's arguments are the JSON text of an object once its CallEnd has come; a call without one was cut or broken and must
not be run. Text never raises: what only looks like calls comes as text, and `DsmlParser.error` tells what broke after a call had begun.

    CallZones(token_bytes, opening)                             which tokens of calls are drawn greedily
    StrictCalls(tools, opening, parallel)                       what a block must look like, for a `GrammarCompiler`
    CallCollector.take(events), .calls                          whole calls as ToolCall(id, name, arguments)
    ReplayMemory.remember(text, calls), .recall(calls)          a block's text, `DsmlParser.block_text`, by the ids of its calls
"""

from ds4jax.text.dsml.calls import ArgumentsDelta, CallCollector, CallEnd, CallEvent, CallStart, Tool, ToolCall
from ds4jax.text.dsml.parser import DsmlParser, ParserEvent, Rejected
from ds4jax.text.dsml.render import TOOLS_MARK, call_block, call_opening, replayed_block, tool_prompt, tool_result
from ds4jax.text.dsml.replay import ReplayMemory
from ds4jax.text.dsml.strict import StrictCalls
from ds4jax.text.dsml.zones import CallZones

__all__ = [
    "TOOLS_MARK",
    "ArgumentsDelta",
    "CallCollector",
    "CallEnd",
    "CallEvent",
    "CallStart",
    "CallZones",
    "DsmlParser",
    "ParserEvent",
    "Rejected",
    "ReplayMemory",
    "StrictCalls",
    "Tool",
    "ToolCall",
    "call_block",
    "call_opening",
    "replayed_block",
    "tool_prompt",
    "tool_result",
]

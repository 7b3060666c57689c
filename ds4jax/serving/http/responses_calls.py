"""Calls as items of `/v1/responses`. No I/O.

A call that is cut or broken ends as an item with status "incomplete", without the event that says that its arguments are done:
what stands of them is no JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import orjson

from ds4jax.serving.http.call import new_id
from ds4jax.serving.http.responses_items import ItemEvent, ItemStatus, OutputItem
from ds4jax.serving.http.responses_tools import Form
from ds4jax.text.dsml import CallStart


class _CallItem:
    """What the items of all calls have in common; as told here, nothing is said of a call until it is whole."""

    kind = "call"
    type: str
    id_prefix: str

    def __init__(self, output_index: int, call_id: str, form: Form) -> None:
        self._id, self._call_id, self._form = new_id(self.id_prefix, "_"), call_id, form
        self._parts: list[str] = []
        self._item_place = {"output_index": output_index}
        self._place = {"item_id": self._id, "output_index": output_index}

    def opening(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", {**self._item_place, "item": self.render("in_progress")}

    def add(self, text: str) -> Iterator[ItemEvent]:
        self._parts.append(text)
        yield from ()

    def closing(self, status: ItemStatus) -> Iterator[ItemEvent]:
        if status == "completed":
            yield from self._done()
        yield "response.output_item.done", {**self._item_place, "item": self.render(status)}

    def render(self, status: ItemStatus) -> dict[str, Any]:
        head = {"id": self._id, "type": self.type, "status": status, "call_id": self._call_id}
        return {**head, **self._members(is_whole=status == "completed")}

    @property
    def _arguments(self) -> str:
        return "".join(self._parts)

    @property
    def _name(self) -> dict[str, str]:
        form = self._form
        return {"name": form.name} if form.namespace is None else {"name": form.name, "namespace": form.namespace}

    def _done(self) -> Iterator[ItemEvent]:
        """Tell that the call is whole."""
        yield from ()

    def _members(self, *, is_whole: bool) -> dict[str, Any]:
        """Write what tells this type of item from others."""
        raise NotImplementedError


class FunctionCallItem(_CallItem):
    """A call of a function, whose arguments are told while they are written."""

    type, id_prefix = "function_call", "fc"

    def add(self, text: str) -> Iterator[ItemEvent]:
        self._parts.append(text)
        yield "response.function_call_arguments.delta", {**self._place, "delta": text}

    def _done(self) -> Iterator[ItemEvent]:
        yield "response.function_call_arguments.done", {**self._place, "name": self._form.name, "arguments": self._arguments}

    def _members(self, *, is_whole: bool) -> dict[str, Any]:
        return {**self._name, "arguments": self._arguments}


class CustomCallItem(_CallItem):
    """A call of a tool that takes free text."""

    type, id_prefix = "custom_tool_call", "ctc"

    def _done(self) -> Iterator[ItemEvent]:
        yield "response.custom_tool_call_input.delta", {**self._place, "delta": self._input}
        yield "response.custom_tool_call_input.done", {**self._place, "input": self._input}

    def _members(self, *, is_whole: bool) -> dict[str, Any]:
        return {**self._name, "input": self._input if is_whole else ""}

    @property
    def _input(self) -> str:
        """The text that was meant: that of the one parameter, or all arguments of a model that has made up others."""
        try:
            return msgspec.json.decode(self._arguments, type=_CustomArguments).input
        except (msgspec.MsgspecError, RecursionError):  # lone surrogates too, which no reply could carry
            return self._arguments


class SearchCallItem(_CallItem):
    """A search for further tools, which the client does."""

    type, id_prefix = "tool_search_call", "tsc"

    def _members(self, *, is_whole: bool) -> dict[str, Any]:
        return {"execution": "client", "arguments": orjson.Fragment(self._arguments) if is_whole else {}}


class _CustomArguments(msgspec.Struct):
    input: str


_ITEMS: Mapping[str, type[_CallItem]] = {item.type: item for item in (FunctionCallItem, CustomCallItem, SearchCallItem)}


def call_item(output_index: int, start: CallStart, form: Form | None) -> OutputItem:
    """Begin the item of a call. A name that no tool has is told as the model wrote it: its client answers that there is no such tool."""
    form = form or Form("function_call", start.name)
    return _ITEMS[form.type](output_index, start.id, form)

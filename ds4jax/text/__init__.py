"""Tokens and messages: everything between an API's JSON and token ids. No arrays."""

from ds4jax.text.chat import Message, PromptStyle, opens_reasoning, render, stop_ids
from ds4jax.text.dsml import Tool, ToolCall
from ds4jax.text.segments import Segment, Special, Text, to_ids, to_text
from ds4jax.text.stream import Delta, TextStream
from ds4jax.text.tokenizer import Tokenizer

__all__ = [
    "Delta",
    "Message",
    "PromptStyle",
    "Segment",
    "Special",
    "Text",
    "TextStream",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "opens_reasoning",
    "render",
    "stop_ids",
    "to_ids",
    "to_text",
]

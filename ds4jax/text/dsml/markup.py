"""The tags of DSML, in the three spellings that models write, and how text is kept from being read as a tag."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ds4jax.text.special import DSML

LONGEST_TAG = 4096
"""Characters of an opening tag; a longer one is no tag. It bounds what a stream holds back before it knows the tool's name."""

_GAP = "\\s{0,64}"
"""White space between tags where it has to be waited for, bounded, since all of it is looked at again with every piece of text."""

_ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"}
_ENTITY = re.compile("|".join(_ENTITIES))
_ATTRIBUTE_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})


@dataclass(frozen=True)
class Markup:
    """One spelling. mark: what stands between `<` or `</` and the word of a tag."""

    mark: str

    @cached_property
    def block(self) -> str:
        """The tag that opens a block of calls; it has no attributes."""
        return f"<{self.mark}tool_calls>"

    @cached_property
    def block_end(self) -> str:
        return f"</{self.mark}tool_calls>"

    @cached_property
    def invoke(self) -> str:
        """How the tag that opens a call starts."""
        return f"<{self.mark}invoke"

    @cached_property
    def invoke_end(self) -> str:
        return f"</{self.mark}invoke>"

    @cached_property
    def parameter(self) -> str:
        """How the tag that opens a parameter starts."""
        return f"<{self.mark}parameter"

    @cached_property
    def parameter_end(self) -> str:
        return f"</{self.mark}parameter>"

    @cached_property
    def value_end(self) -> re.Pattern[str]:
        """Match where a value ends: at its end tag, or where that was left out and the call visibly ends around it.

        An end tag of a call counts only with what must follow it, since a value may well quote one tag.
        """
        following = f"{re.escape(self.block_end)}|{re.escape(self.invoke)}\\s"
        return re.compile(f"{re.escape(self.parameter_end)}|(?={re.escape(self.invoke_end)}{_GAP}(?:{following}))")

    @cached_property
    def value_end_begun(self) -> re.Pattern[str]:
        """Match the end of a text from where a match of `value_end` may have begun."""
        begun = begun_by([self.parameter_end, self.invoke_end])
        following = begun_by([self.block_end, self.invoke])
        after_call = f"{re.escape(self.invoke_end)}{_GAP}(?:{following}|{re.escape(self.invoke)})?"
        return re.compile(f"(?:{begun}|{after_call})\\Z")


FULL = Markup(DSML)
"""What the model is told to write; its mark is one token."""

SPELLINGS = (FULL, Markup(DSML[1:]), Markup(""))


def begun_by(literals: Sequence[str]) -> str:
    """Build the expression for all beginnings of some literals, whole ones and the empty one left out."""
    return "|".join(_begun_by(literal) for literal in literals)


def _begun_by(literal: str) -> str:
    expression = ""
    for character in reversed(literal[1:-1]):
        expression = f"(?:{re.escape(character)}{expression})?"
    return re.escape(literal[0]) + expression


BLOCK = re.compile("|".join(re.escape(spelling.block) for spelling in SPELLINGS))
BLOCK_BEGUN = re.compile(f"(?:{begun_by([spelling.block for spelling in SPELLINGS])})\\Z")
ENTITY_BEGUN = re.compile(f"(?:{begun_by(list(_ENTITIES))})\\Z")


def unescape(text: str) -> str:
    """Decode the five entities."""
    return _ENTITY.sub(lambda match: _ENTITIES[match.group()], text)


def escape_attribute(text: str) -> str:
    """Write text between the quotes of an attribute."""
    return text.translate(_ATTRIBUTE_ESCAPES)


def escape_string(value: str) -> str:
    """Write a string between the tags of its parameter: as it is, but for what would be read as the end tag or as an entity."""
    value = _ENTITY.sub(lambda match: "&amp;" + match.group()[1:], value)
    return value.replace(FULL.parameter_end, "&lt;" + FULL.parameter_end[1:])

"""The special-token literals that the server itself reads or writes. `｜` is U+FF5C, `▁` is U+2581."""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"

ALWAYS_ADDED = frozenset({BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML})
"""Added tokens whatever type a file gives them: ds4 finds these seven by their text and ignores the types."""

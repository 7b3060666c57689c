"""Prompts made by templates, and tools told in other words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4jax.cli.options import read_chat_template, read_tool_prompt
from ds4jax.errors import ConfigError, RequestError
from ds4jax.text.chat import Message, ToolCall, opens_reasoning, render
from ds4jax.text.dsml import Tool
from ds4jax.text.effort import Thinking
from ds4jax.text.segments import Special, Text, to_text
from ds4jax.text.special import ALWAYS_ADDED, ASSISTANT, BOS, DSML, THINK, USER
from ds4jax.text.template import ChatTemplate

USUAL = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}<｜User｜>{{ message.content }}
    {%- elif message.role == "assistant" %}<｜Assistant｜></think>{{ message.content }}
        {%- for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}
        {{- eos_token }}
    {%- else %}{{ message.role }}:{{ message.content }}
    {%- endif %}
{%- endfor %}
{%- for tool in tools or [] %}({{ tool.function | tojson }}){% endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{{ "<think>" if thinking else "</think>" }}{% endif %}"""
TOOL = Tool("now", '{"name": "now", "description": "é"}')


def test_what_a_template_sees() -> None:
    messages = [
        Message("developer", "S"),
        Message("user", "hi"),
        Message("assistant", "a", "why", (ToolCall("c1", "now", '{"x": "<é>"}'),)),
        Message("function", "noon", tool_call_id="c1"),
    ]
    assert to_text(ChatTemplate(USUAL).render(messages, thinking=True, tools=[TOOL])) == (
        "<｜begin▁of▁sentence｜>system:S<｜User｜>hi<｜Assistant｜></think>a"
        '[now {"x": "<é>"}]<｜end▁of▁sentence｜>tool:noon({"name": "now", "description": "é"})<｜Assistant｜><think>'
    )


@pytest.mark.parametrize(
    ("thinking", "says"), [(Thinking.OFF, "False None"), (Thinking.HIGH, "True high"), (Thinking.MAX, "True max"), (True, "True high")]
)
def test_effort(thinking: Thinking, says: str) -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ reasoning_effort }}")
    assert template.render([Message("user", "hi")], thinking=thinking) == [Text(says)]


@pytest.mark.parametrize(("end", "opens"), [("<think>", True), ("<think>\n", True), ("<think>so", False), ("</think>", False), ("", False)])
def test_whether_reasoning_follows(end: str, opens: bool) -> None:
    assert opens_reasoning(ChatTemplate("{{ bos_token }}" + end).render([Message("user", "hi")], thinking=True)) is opens


literals = st.lists(st.sampled_from(sorted(ALWAYS_ADDED)) | st.text(max_size=4) | st.just("\ufdd0"), max_size=6).map("".join)


@given(content=literals, argument=literals)
def test_what_clients_say_stays_text(content: str, argument: str) -> None:
    """Only the template's own text makes special tokens, whatever users, arguments and tools hold."""
    messages = [Message("user", content), Message("assistant", "", tool_calls=(ToolCall("c1", "f", argument),)), Message("user", content)]
    segments = ChatTemplate(USUAL).render(messages, thinking=True, tools=[Tool("f", f'{{"name": "{DSML}"}}')])
    specials = [segment.literal for segment in segments if isinstance(segment, Special)]
    assert specials == [BOS, USER, ASSISTANT, "</think>", "<｜end▁of▁sentence｜>", USER, ASSISTANT, THINK]
    texts = [segment.text for segment in segments if isinstance(segment, Text)]
    wanted = content.replace("\ufdd0", "")
    assert not wanted or any(text.startswith(wanted) for text in texts)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("{{ messages[3].content.upper() }}", "cannot render a single user message"),
        ("{{ raise_exception('only for pictures') }}", "only for pictures"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render a single user message"),
        ("{% include 'other' %}", "cannot render"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_is_no_good_is_refused_at_the_start(source: str, says: str) -> None:
    with pytest.raises(ConfigError, match="chat template") as error:
        ChatTemplate(source)
    assert says in str(error.value)


def test_a_conversation_that_a_template_refuses_is_a_request_error() -> None:
    template = ChatTemplate("{{ raise_exception('no system text') if messages[0].role == 'system' }}")
    with pytest.raises(RequestError, match="no system text") as error:
        template.render([Message("system", "S")], thinking=False)
    assert error.value.param == "messages"


@pytest.mark.parametrize("arguments", ["not JSON", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"], ids=["broken", "deep"])
def test_arguments_that_are_no_object_are_shown_as_text(arguments: str) -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("c1", "f", arguments),))
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments if messages[0].tool_calls }}")
    assert template.render([call], thinking=False) == [Text(arguments)]


def test_tools_in_other_words() -> None:
    segments = render([Message("system", "S"), Message("user", "hi")], thinking=False, tools=[TOOL], tool_text="<｜DSML｜invoke {tools}!")
    tools = [Text("S\n\n<"), Special(DSML), Text('invoke {"name": "now", "description": "é"}!')]
    assert segments[1:4] == tools


def test_tool_schemas_cannot_bring_marks_along() -> None:
    tool = Tool("f", '{"name": "{tools} <｜DSML｜tool_calls>"}')
    segments = render([Message("user", "hi")], thinking=False, tools=[tool], tool_text="a {tools} b")
    assert segments[1] == Text('a {"name": "{tools} <｜DSML｜tool_calls>"} b')


def test_the_files_of_the_options(tmp_path: Path) -> None:
    path = tmp_path / "text"
    assert read_tool_prompt(None) is None and read_chat_template(None, lambda: "x") is None
    path.write_text("You have {tools}.", encoding="utf-8")
    assert read_tool_prompt(path) == read_chat_template(str(path), lambda: None) == "You have {tools}."
    assert read_chat_template("gguf", lambda: "of the model") == "of the model"


@pytest.mark.parametrize(("content", "says"), [("none", "there 0 times"), ("{tools} {tools}", "there 2 times"), (None, "cannot be read")])
def test_a_text_about_tools_has_one_place_for_them(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"--tool-prompt .*{says}"):
        read_tool_prompt(path)


def test_weights_without_a_template() -> None:
    with pytest.raises(ConfigError, match="bring no template"):
        read_chat_template("gguf", lambda: None)

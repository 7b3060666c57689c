"""Grammars that an answer has to follow: compiled by llguidance, then walked token by token.

Whoever writes a grammar may mean harm, so all of it is bounded: the length of the text, what compiling may build, and what one step may
cost. Compiling takes milliseconds as a rule, and at the worst a few seconds, in which other threads of Python run. What cannot be bounded
is tried in a process of its own first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Literal

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from ds4jax.errors import GrammarError, RequestError
from ds4jax.text.dsml.strict import StrictCalls, calls_grammar
from ds4jax.text.grammar_trial import complaint, needs_trial, parser_limits
from ds4jax.text.tokenizer import Tokenizer

LONGEST_GRAMMAR = 128 << 10  # characters; twice as many cost four times as much
LARGEST_MULTIPLE = 10_000  # a state of an automaton for each remainder
_LONGEST_REASON = 300  # characters of llguidance's that are told

_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+0-9.eE]+)')
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
# As many blanks as one would indent by, and no more: a model that begins to write blanks may never end.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"

_JSON_OPTIONS = {"lenient": True, "whitespace_pattern": _WHITE_SPACE}

Kind = Literal["json_schema", "regex", "choice", "grammar", "calls"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to look like.

    text: a JSON schema, a regular expression, the JSON list of the possible answers, a grammar in the notation of Lark or GBNF, or what
    `calls_grammar` has written.
    param: the field of the request that has it. is_lenient: what cannot be enforced of a schema is no error but is left out.
    """

    kind: Kind
    text: str
    param: str
    is_lenient: bool = False


class Matcher:
    """Follow one text. Neither thread safe nor tied to a thread."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def advance(self, token: int) -> bytes | None:
        """Take the next token; return which may come behind it, or None if nothing can: the text is complete.

        The mask has a bit for each token, in little-endian words of 32. The token that ends a text is in it where the text may end.
        Raises GrammarError when a token does not fit, or a step costs too much.
        """
        self._matcher.consume_token(token)
        self._check()
        return None if self._matcher.is_stopped() else self.mask()

    def mask(self) -> bytes:
        """Return which tokens may come next. Raises GrammarError."""
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher.get_error()))


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar over one vocabulary, to be followed by any number of texts.

    first_mask: the tokens that a text may begin with, as `Matcher.advance` gives them. end_id: the token that ends a text.
    """

    begin: Callable[[], Matcher]
    first_mask: bytes
    end_id: int


class GrammarCompiler:
    """Compile grammars over the vocabulary of a tokenizer. Thread safe. Making one takes half a second of a large vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._end_id, self.mark_id = tokenizer.eos_id, tokenizer.dsml_id
        self._specials = tuple(sorted(tokenizer.special_literals))
        self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Description(tokenizer)))

    def compile_calls(self, calls: StrictCalls, param: str) -> CompiledGrammar:
        """Compile what a block of tool calls has to look like. Raises RequestError naming `param`."""
        return self.compile(Grammar("calls", self._lark_of(calls), param))

    def compile(self, grammar: Grammar, *, or_calls: bool = False, calls: StrictCalls | None = None) -> CompiledGrammar:
        """Compile a grammar; or_calls: so that a block of tool calls is as good as an answer, one like `calls` if that is given.

        Raises RequestError naming its field if it is no grammar, or one that is too large.
        """
        _check_size(grammar)
        try:
            text = _TRANSLATE[grammar.kind](grammar)
            if or_calls and self.mark_id is not None:
                text = self._or_calls(text, calls)
        except Exception as error:  # the translation of GBNF raises whatever it does not expect
            raise _refusal(grammar, str(error)) from None
        if needs_trial(text) and (reason := complaint(text, self._specials)) is not None:
            raise _refusal(grammar, reason)
        matcher = llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        begin = partial(_begin, matcher)
        try:
            first_mask = begin().mask()
        except GrammarError as error:
            raise _refusal(grammar, error.reason) from None
        return CompiledGrammar(begin, first_mask, self._end_id)

    def _lark_of(self, calls: StrictCalls) -> str:
        assert self.mark_id is not None
        return calls_grammar(calls, self.mark_id, _JSON_OPTIONS)

    def _or_calls(self, text: str, calls: StrictCalls | None) -> str:
        """Leave open, with the first token, whether an answer comes or a block of calls; the parser of calls ends a block of any form."""
        mark = f"<[{self.mark_id}]>"
        either = f'start: @answer | "\\n\\n<" {mark} @block'
        block = f'start: "tool_calls>" (/(.|\\n)+/ | {mark})*' if calls is None else self._lark_of(calls)
        (answer,) = json.loads(text)["grammars"]
        others = [{**answer, "name": "answer"}, {"name": "block", "lark_grammar": block}]
        return json.dumps({"grammars": [{"name": "reply", "lark_grammar": either}, *others]})


class _Description:
    """A tokenizer as llguidance wants it described."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        self.special_token_ids = [i for i in range(tokenizer.n_vocab) if tokenizer.is_special(i)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """Encode what a grammar leaves no choice about, so that it is written in the tokens that the model knows it by."""
        return self._tokenizer.encode(text.decode(errors="replace"))


def _begin(matcher: llguidance.LLMatcher) -> Matcher:
    return Matcher(matcher.deep_copy())


# ---------------------------------------------------------------- translations into llguidance's own form
def _from_schema(grammar: Grammar) -> str:
    try:
        json.loads(grammar.text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    options: llguidance._lib.JsonCompileOptions = {"lenient": grammar.is_lenient, "whitespace_pattern": _WHITE_SPACE}
    return llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)


def _from_choice(grammar: Grammar) -> str:
    """List the choices in one terminal, which has an automaton; as alternatives of a rule, 2,000 would be too many to be followed."""
    choices: Sequence[str] = json.loads(grammar.text)
    return _from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def _from_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


_TRANSLATE: dict[Kind, Callable[[Grammar], str]] = {
    "json_schema": _from_schema,
    "regex": lambda grammar: llguidance.LLMatcher.grammar_from_regex(grammar.text),
    "choice": _from_choice,
    "grammar": lambda grammar: _from_lark(any_to_lark(grammar.text)),
    "calls": lambda grammar: _from_lark(grammar.text),
}


# ---------------------------------------------------------------- bounds and refusals
def _check_size(grammar: Grammar) -> None:
    """Refuse what llguidance's own limits let through and what still takes too long."""
    if len(grammar.text) > LONGEST_GRAMMAR:
        raise _refusal(grammar, f"it has {len(grammar.text)} characters, expected at most {LONGEST_GRAMMAR}")
    text = _ESCAPE.sub(lambda match: chr(int(match.group(1), 16)), grammar.text)
    for number in _MULTIPLE.findall(text):
        try:
            digits = int("".join(map(str, Decimal(number).normalize().as_tuple().digits)))
        except InvalidOperation:
            continue  # no JSON, which is told in other words
        if digits > LARGEST_MULTIPLE:
            raise _refusal(grammar, f"multipleOf {number[:20]} has too many digits that count; expected at most {LARGEST_MULTIPLE}")


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    noun = {"json_schema": "schema", "regex": "expression", "choice": "list", "grammar": "grammar", "calls": "set of tools"}[grammar.kind]
    return RequestError(f"{grammar.param}: this {noun} cannot be enforced ({_reason(reason)}); mend or simplify it", grammar.param)


def _reason(text: str) -> str:
    """Shorten what llguidance says to what a client can use."""
    text = " ".join(text.partition("\n<")[0].split())
    if text == "NoExtensionBias":
        text = "no text that ends can follow it"
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"

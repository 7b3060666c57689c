"""Make the packed training tokens and the vocabulary, once, on a CPU: `python -m tools.train_small.prepare`."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import typer

from ds4jax.evals.dialogues import Dialogue
from ds4jax.text.chat import render
from ds4jax.text.segments import to_ids, to_text
from ds4jax.text.special import EOS
from ds4jax.text.tokenizer import Tokenizer
from tools.train_small.documents import as_chat, make_documents, read_pairs
from tools.train_small.learn import learn_vocabulary, tokenizer_of
from tools.train_small.pack import Packed, pack_windows, save
from tools.train_small.shapes import N_VOCAB

WIDTH = 2048
N_LEARN = 30_000  # conversations that the vocabulary is learnt from
N_EVAL_TEXTS = 48  # held-out pairs that come with the package


def encode(dialogue: Dialogue, tokenizer: Tokenizer) -> list[int]:
    """Encode a whole conversation, its answers included."""
    return to_ids(render(dialogue.messages, thinking=dialogue.thinking, tools=dialogue.tools), tokenizer)


def main(
    texts: Annotated[Path, typer.Option(help="simple_english.jsonl.gz")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    rule_made: Annotated[int, typer.Option(help="Conversations made by rule.")] = 90_000,
    limit: Annotated[int | None, typer.Option(help="Only so many texts of the corpus.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same file.")] = 0,
    held_out_texts: Annotated[Path | None, typer.Option(help="Also write some held-out texts here, for ds4jax eval.")] = None,
) -> None:
    """Turn texts and rules into windows of tokens."""
    pairs, held_out = read_pairs(texts)
    pairs, held_out = pairs[:limit], held_out[:limit]
    documents = list(make_documents(pairs, rule_made, seed))
    Random(seed).shuffle(documents)
    sample = (to_text(render(d.messages, thinking=d.thinking, tools=d.tools)) for d in islice(documents, N_LEARN))
    vocabulary = learn_vocabulary(sample, N_VOCAB)
    tokenizer = tokenizer_of(vocabulary)
    print(f"{len(pairs)} texts, {len(documents)} conversations", flush=True)

    encoded = [encode(document, tokenizer) for document in documents]
    n_tokens = sum(map(len, encoded))
    rng = Random(seed + 1)
    tests = [encode(as_chat(rng, pair, thinking=False), tokenizer) for pair in held_out]
    pad = vocabulary.tokens.index("<｜▁pad▁｜>")
    windows = np.random.default_rng(seed).permutation(pack_windows(encoded, WIDTH, pad))
    packed = Packed(vocabulary, windows, pack_windows(tests, WIDTH, pad))
    save(out, packed)
    filled, size_mb = np.mean(windows != pad), out.stat().st_size / 1e6
    print(
        f"{n_tokens / 1e6:.1f} M tokens; windows {windows.shape}, {filled:.0%} filled; held out {packed.held_out.shape}; {size_mb:.1f} MB"
    )
    if held_out_texts is not None:
        chosen = [pair for pair in held_out if EOS not in pair.text][:N_EVAL_TEXTS]
        held_out_texts.write_text("".join(json.dumps({"prompt": p.prompt, "text": p.text}) + "\n" for p in chosen), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

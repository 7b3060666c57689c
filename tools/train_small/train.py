"""Train the small model and the plain transformer beside it: `python -m tools.train_small.train`."""

from __future__ import annotations

import csv
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

from ds4jax.config import ModelConfig
from ds4jax.model.gguf.writer import write_weights
from tools.train_small import pack
from tools.train_small.objective import Marks
from tools.train_small.shapes import shapes_of
from tools.train_small.tasks import Ours, Plain
from tools.train_small.trainer import Curve, Plan, Trainer

PLAIN_SHARE = 0.25  # of the time
ABOUT: dict[str, str | list[str]] = {
    "general.license": "mit",
    "general.author": "the ds4jax authors",
    "general.description": "A small model of the DeepSeek V4 architecture for demonstrations: simple English, thoughts, tool calls. "
    "Trained on texts sampled from SmolLM2-135M-Instruct (Apache-2.0) and on conversations made by rule. Its facts are often wrong.",
    "general.languages": ["en"],
}


class Which(StrEnum):
    """What to train."""

    OURS = "ours"
    PLAIN = "plain"
    BOTH = "both"


def main(
    data: Annotated[Path, typer.Option(help="What prepare wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the model, the curve and the numbers.")],
    minutes: Annotated[float, typer.Option(help="For both models together, compiling included.")] = 8.0,
    steps: Annotated[int | None, typer.Option(help="Train so many steps instead; then the same seed gives the same model.")] = None,
    shape: Annotated[str, typer.Option(help="small, or smoke for a test.")] = "small",
    batch_tokens: Annotated[int, typer.Option(help="Tokens a step.")] = 32768,
    peak: Annotated[float, typer.Option(help="Largest learning rate.")] = 1.8e-3,
    which: Annotated[Which, typer.Option("--train", help="On two devices, two commands train both at the same time.")] = Which.BOTH,
    checkpoint: Annotated[Path | None, typer.Option(help="Save to this .npz file at times, and go on from it if it exists.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Train, then write model.gguf, curve.csv, curve.png and numbers.json."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    config, plain_shape = shapes_of(shape)
    packed = pack.load(data)
    marks = Marks.of(packed.vocabulary)
    counts = np.bincount(packed.windows.reshape(-1), minlength=config.n_vocab)
    dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    seconds = minutes * 60
    print(f"{jax.devices()[0].device_kind}, {dtype}, windows {packed.windows.shape}", flush=True)

    curve, plan = Curve(), Plan(steps, peak, batch_tokens, seed)
    numbers: dict[str, float] = {}
    with ThreadPoolExecutor(6) as pool:  # all programs compile at once, in the time that the first of them takes
        ours = beside = None
        if which is not Which.PLAIN:
            ours = Trainer(Ours(config, marks, dtype, counts), packed, marks, replace(plan, checkpoint=checkpoint), pool)
        if which is not Which.OURS:
            beside = Trainer(Plain(plain_shape, marks, dtype), packed, marks, plan, pool)
        n_step = None
        if ours:
            n_step = ours.run(curve, began, seconds * (1 - PLAIN_SHARE if beside else 1))
            numbers |= {"steps": n_step, "held_out_loss": ours.held_out_loss(), "parameters": ours.n_parameter}
            _write_model(out / "model.gguf", ours, config, packed)
            _write_curve(out, curve)
        if beside:
            # As many steps as ours, if there is time.
            n_plain = beside.run(curve, began, seconds - (time.monotonic() - began), n_step)
            numbers |= {"plain_steps": n_plain, "plain_held_out_loss": beside.held_out_loss(), "plain_parameters": beside.n_parameter}
    for name in ("", "plain_"):
        if f"{name}held_out_loss" in numbers:
            numbers[f"{name}held_out_perplexity"] = math.exp(numbers[f"{name}held_out_loss"])
    _write_curve(out, curve)
    (out / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(json.dumps(numbers), flush=True)


def _write_model(path: Path, trainer: Trainer, config: ModelConfig, packed: pack.Packed) -> None:
    weights = {name: np.asarray(w) for name, w in (trainer.state.weights | trainer.state.fixed).items()}
    write_weights(path, config, "q8", weights, packed.vocabulary, ABOUT)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def _write_curve(out: Path, curve: Curve) -> None:
    """Write the curve as CSV, and as a picture where matplotlib is installed."""
    with (out / "curve.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("model", "step", "tokens", "minutes", "loss", "held_out_loss"))
        writer.writerows((*row[:3], f"{row[3]:.3f}", f"{row[4]:.4f}", f"{row[5]:.4f}") for row in curve.rows)
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(row[0] for row in curve.rows):
        rows = [row for row in curve.rows if row[0] == name]
        (line,) = axes.plot([row[2] / 1e6 for row in rows], [row[4] for row in rows], alpha=0.4, label=f"{name}, training")
        tested = [row for row in rows if not math.isnan(row[5])]
        axes.plot([r[2] / 1e6 for r in tested], [r[5] for r in tested], "o-", color=line.get_color(), label=f"{name}, held out")
    axes.set(xlabel="million tokens", ylabel="cross entropy of a token", ylim=(0, 4))
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "curve.png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)

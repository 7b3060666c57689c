"""Draw what was measured; needs matplotlib.

    python benchmarks/plot.py

- docs/img/h200_decode.svg: `ds4jax bench decode` on an H200, ms a step against rows, beside what the card's memory allows.
- docs/img/step_profile.png: `benchmarks.step_profile`, the parts of a step by rows, of the model and machine that were measured last.

A plot whose results are not there is left as it is.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "img"
# Bytes of the weights that a step of so many rows reads once, at 3.9 TB/s, which a copy reaches on the card.
FLOOR_MS = {1: 2.45, 16: 8.3, 64: 17.6}
# ds4 on the same card and shapes: one session at 2,048 tokens of context, and 16, which it steps one by one.
DS4_MS = {1: 1000 / 60, 16: 16 * 1000 / 56}

Rows = Sequence[dict[str, str]]


def latest(rows: Rows) -> dict[int, float]:
    """Take the last measurement of each bucket with all 43 layers and 2,048 tokens in every slot, of 4,096."""
    full = [row for row in rows if (row["layers"], row["live"], row["ctx"]) == ("43", "2048", "4096")]
    return dict(sorted({int(row["bucket"]): float(row["ms_median"]) for row in full}.items()))


def draw_decode(rows: Rows, out: Path) -> None:
    """Draw ms a step against rows."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for label, points, style in (("ds4", DS4_MS, "s--"), ("ds4jax", latest(rows), "o-"), ("memory alone", FLOOR_MS, "^:")):
        axes.plot(list(points), list(points.values()), style, label=label)
        for n_rows, ms in points.items():
            axes.annotate(f"{ms:.3g}", (n_rows, ms), textcoords="offset points", xytext=(4, 5), fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="sessions in a step", ylabel="ms a step", xticks=[1, 4, 16, 64], xticklabels=[1, 4, 16, 64])
    axes.set_title("DeepSeek V4 Flash, 43 layers, q2, one H200, 2,048 tokens in every slot", fontsize=9)
    axes.minorticks_off()
    axes.legend()
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def latest_profile(rows: Rows) -> dict[int, dict[str, float]]:
    """Take the last profile of each bucket, ms by part, of the subject that was measured last."""

    def subject(row: dict[str, str]) -> list[str]:
        return [row[name] for name in ("device", "model", "quant", "dtype", "layers", "live")]

    profiles: dict[int, dict[str, float]] = {}
    for row in rows:
        if subject(row) == subject(rows[-1]):
            profiles.setdefault(int(row["bucket"]), {})[row["part"]] = float(row["ms"])
    return dict(sorted(profiles.items()))


def draw_step_profile(rows: Rows, out: Path) -> None:
    """Draw a stacked bar a bucket."""
    profiles, last = latest_profile(rows), rows[-1]
    names = [str(bucket) for bucket in profiles]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    below = [0.0] * len(names)
    colours = plt.get_cmap("tab20")
    for i, part in enumerate(next(iter(profiles.values()))):
        ms = [profile[part] for profile in profiles.values()]
        style = {"color": "none", "edgecolor": "grey", "hatch": "//"} if part == "gaps" else {"color": colours(i)}
        axes.bar(names, ms, bottom=below, label=part, width=0.6, **style)
        below = [a + b for a, b in zip(below, ms, strict=True)]
    for name, total in zip(names, below, strict=True):
        axes.annotate(f"{total:.3g}", (name, total), textcoords="offset points", xytext=(0, 3), ha="center", fontsize=8)
    axes.set(xlabel="sessions in a step", ylabel="ms a step, under the profiler")
    axes.set_title(f"{last['model']}, {last['layers']} layers, {last['quant']}, {last['device']}, {last['live']} tokens live", fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(out, dpi=150, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Write the plots."""
    for results, out, draw in (
        (RESULTS / "h200_decode.csv", IMAGES / "h200_decode.svg", draw_decode),
        (RESULTS / "step_profile.csv", IMAGES / "step_profile.png", draw_step_profile),
    ):
        if results.exists():
            with results.open(newline="", encoding="utf-8") as file:
                draw(list(csv.DictReader(file)), out)


if __name__ == "__main__":
    main()

"""Draw what `ds4jax bench decode` measured on an H200: ms a step against rows, beside what the card's memory allows.

python benchmarks/plot.py          # writes docs/img/h200_decode.svg; needs matplotlib
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS, OUT = ROOT / "benchmarks" / "results" / "h200_decode.csv", ROOT / "docs" / "img" / "h200_decode.svg"
# Bytes of the weights that a step of so many rows reads once, at 3.9 TB/s, which a copy reaches on the card.
FLOOR_MS = {1: 2.45, 16: 8.3, 64: 17.6}
# ds4 on the same card and shapes: one session at 2,048 tokens of context, and 16, which it steps one by one.
DS4_MS = {1: 1000 / 60, 16: 16 * 1000 / 56}


def latest(rows: list[dict[str, str]]) -> dict[int, float]:
    """Take the last measurement of each bucket with all 43 layers and 2,048 tokens in every slot."""
    full = [row for row in rows if row["layers"] == "43" and row["live"] == "2048"]
    return dict(sorted({int(row["bucket"]): float(row["ms_median"]) for row in full}.items()))


def main() -> None:
    """Write the plot."""
    with RESULTS.open(newline="", encoding="utf-8") as file:
        measured = latest(list(csv.DictReader(file)))
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for label, points, style in (("ds4", DS4_MS, "s--"), ("ds4jax", measured, "o-"), ("memory alone", FLOOR_MS, "^:")):
        axes.plot(list(points), list(points.values()), style, label=label)
        for rows, ms in points.items():
            axes.annotate(f"{ms:.3g}", (rows, ms), textcoords="offset points", xytext=(4, 5), fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="sessions in a step", ylabel="ms a step", xticks=[1, 4, 16, 64], xticklabels=[1, 4, 16, 64])
    axes.set_title("DeepSeek V4 Flash, 43 layers, q2, one H200, 2,048 tokens in every slot", fontsize=9)
    axes.minorticks_off()
    axes.legend()
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Draws what the triggers of backdoor attacks look like, for docs/attacks.md: images of CIFAR-10, a window of
UCI HAR, a text and a row of a table.

    HOLDFAST_DATA=... python benchmarks/triggers.py --out docs/img/triggers.png"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import Tensor

from holdfast.core.registry import build
from holdfast.data.federation import DataSettings, Samples, load_samples
from holdfast.data.hashed_words import WordHasher, split_words

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

IMAGES: dict[str, Any] = {
    "nothing": None,
    "patch": "patch",
    'patch, pattern = "noise"': {"name": "patch", "pattern": "noise"},
    "bars": {"name": "bars", "width": 6, "gap": 3},
    "bars, part 2 of 4": {"name": "bars", "width": 6, "gap": 3},
    "blended": "blended",
}
WINDOWS: dict[str, Any] = {
    "nothing": None,
    "disturbance": "disturbance",
    'disturbance, wave = "sine", channels = [0]': {
        "name": "disturbance",
        "wave": "sine",
        "channels": [0],
        "first": 40,
        "steps": 32,
    },
}
TEXT = "Oil prices fell on Tuesday as supplies rose"
SHOWN, INK, CHANGED = 3, "#1b1f24", "#c2410c"


def stamped(samples: Samples, given: Any, rows: Tensor, title: str) -> Tensor:
    """These samples with the trigger, or with a part of it."""
    x = samples.x[rows]
    if given is None:
        return x
    stamp = build("trigger", given)
    return stamp.parts(samples, 4)[1](x) if "part" in title else stamp.on(samples)(x)


def draw(out: Path) -> None:
    images = load_samples(DataSettings(name="cifar10"))
    windows = load_samples(DataSettings(name="uci-har"))
    figure = pyplot.figure(figsize=(11, 6.2))
    grid = figure.add_gridspec(4, 12, height_ratios=[2.2, 2.2, 2.4, 1.4], hspace=0.3, wspace=0.3)
    for column, (title, given) in enumerate(IMAGES.items()):
        for line, x in enumerate(stamped(images, given, torch.tensor([4, 7]), title)):
            axes = figure.add_subplot(grid[line, 2 * column : 2 * column + 2])
            axes.imshow(np.asarray(x.permute(1, 2, 0)))
            axes.set_xticks([])
            axes.set_yticks([])
            if not line:
                axes.set_title(title, fontsize=9, color=INK)
    for column, (title, given) in enumerate(WINDOWS.items()):
        axes = figure.add_subplot(grid[2, 4 * column : 4 * column + 4])
        (x,) = stamped(windows, given, torch.tensor([200]), title)
        for channel in range(SHOWN):
            axes.plot(x[channel].numpy() + channel, linewidth=1)
        axes.set_title(title, fontsize=9, color=INK)
        axes.set_yticks([])
        axes.tick_params(labelsize=7)
    _text(figure.add_subplot(grid[3, :6]))
    _table(figure.add_subplot(grid[3, 6:]))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, bbox_inches="tight", facecolor="white")


def _text(axes: Axes) -> None:
    """The words of a text, before and after."""
    words = [*split_words(TEXT), "cf"]
    hasher = WordHasher(len(words) - 1)
    known = {int(hasher.rows([word])[0, 0]): word for word in words}
    x = torch.from_numpy(hasher.rows([TEXT]))
    samples = Samples(x, torch.zeros(1, dtype=torch.int64), 2, 1)
    lines = {"nothing": x, "word": build("trigger", "word").on(samples)(x)}
    lines["word, place = 3"] = build("trigger", {"name": "word", "place": 3}).on(samples)(x)
    axes.set_axis_off()
    for line, (title, row) in enumerate(lines.items()):
        height = 0.9 - 0.38 * line
        axes.text(0, height, title, fontsize=9, color=INK, transform=axes.transAxes)
        begin = 0
        for word in (known[number] for number in row[0].tolist()):
            axes.text(
                0.28 + 0.0155 * begin,
                height,
                word,
                fontsize=8,
                family="monospace",
                color=CHANGED if word == "cf" else INK,
                transform=axes.transAxes,
            )
            begin += len(word) + 1


def _table(axes: Axes) -> None:
    """A row of a standardised table, before and after."""
    x = torch.tensor([[-0.4, 1.2, 0.1, -0.9, 0.6]])
    samples = Samples(x, torch.zeros(1, dtype=torch.int64), 2, 1)
    lines = {"nothing": x, "value": build("trigger", "value").on(samples)(x)}
    axes.set_axis_off()
    for line, (title, row) in enumerate(lines.items()):
        height = 0.9 - 0.38 * line
        axes.text(0.25, height, title, fontsize=9, color=INK, transform=axes.transAxes)
        for place, (number, was) in enumerate(zip(row[0].tolist(), x[0].tolist(), strict=True)):
            colour = INK if number == was else CHANGED
            axes.text(
                0.4 + 0.12 * place,
                height,
                f"{number:.1f}",
                fontsize=9,
                color=colour,
                transform=axes.transAxes,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the triggers of backdoor attacks.")
    parser.add_argument("--out", type=Path, default=Path("docs/img/triggers.png"), help="the picture")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()

"""The data of every client in a terminal, on a page, as a picture and as JSON: the same numbers
everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from holdfast.experiment.config import make_config
from holdfast.report.axis import round_step
from holdfast.report.class_counts import Holdings, spread
from holdfast.report.data_page import render
from holdfast.report.drawing import file_content
from holdfast.report.heat_map_files import holdings_drawing, write_heat_map
from holdfast.report.terminal_heat_map import heat_lines
from tests.report.balanced_html import Balanced


def holdings(part: str = "train", **data: Any) -> Holdings:
    return Holdings.of(make_config({"data": data}), part)


def many(clients: int, classes: int, **data: Any) -> Holdings:
    options = {"samples": 12_000, "classes": classes, "shape": [2]}
    return holdings(name="synthetic", options=options, clients=clients, partition="iid", **data)


def named() -> Holdings:
    """Two classes with awkward names."""
    plain = holdings(
        name="synthetic", options={"samples": 100, "classes": 2, "shape": [2]}, clients=3, partition="iid"
    )
    object.__setattr__(plain.federation.samples, "class_names", ("<b>&", "walking upstairs"))
    return plain


def test_the_numbers_are_those_of_the_federation() -> None:
    found = holdings(clients=6, held_out=2, split={"train": 0.5, "validation": 0.2, "test": 0.3}, root=10)
    fed = found.federation
    for client in range(6):
        assert (
            found.counts[client].tolist()
            == np.bincount(fed.train.client(client)[1].numpy(), minlength=10).tolist()
        )
    iid: dict[str, Any] = {"partition": "iid", "split": {"train": 0.5, "validation": 0.2, "test": 0.3}}
    parts, whole = [holdings(part, **iid) for part in ("train", "validation", "test")], holdings("all", **iid)
    assert np.array_equal(sum(one.counts for one in parts), whole.counts) and whole.counts.sum() == 1797
    plain = found.plain()
    assert (
        plain["digest"] == fed.digest
        and plain["counts"] == found.counts.tolist()
        and plain["held_out"] == list(fed.held_out)
    )
    assert plain["sizes"] == {
        "min": found.sizes.min(),
        "median": np.median(found.sizes),
        "max": found.sizes.max(),
    }
    assert plain["samples"]["root"] == 10 and plain["samples"]["train"] == found.counts.sum()
    words = dict(found.described())
    assert (
        words["digest"] == fed.digest
        and "of which 2 are held out" in words["clients"]
        and words["server"].startswith("10 samples")
    )
    assert dict(holdings(clients=3).described())["partition"] == "pathological (classes per client 2)"


def test_spread_and_steps() -> None:
    assert spread(np.array([3, 3])) == "3" and spread(np.array([1, 2, 9000])) == "1 to 9,000 (median 2)"
    assert [round_step(x) for x in (0.3, 1, 1.5, 4, 7, 11, 200, 201)] == [1, 1, 2, 5, 10, 20, 200, 500]


def test_a_small_table_has_every_number_and_sums() -> None:
    found = holdings(clients=4, held_out=1)
    lines = [line.plain for line in heat_lines(found, 80)]
    late = found.federation.held_out[0]
    for client, line in enumerate(lines[1:5]):
        cells = line.split()
        assert (
            cells[0] == f"{client}{'*' if client == late else ''}" and int(cells[-1]) == found.sizes[client]
        )
        assert [0 if cell == "·" else int(cell) for cell in cells[1:-1]] == found.counts[client].tolist()
    assert lines[5].split()[2:-1] == [str(n) for n in found.counts.sum(0)] and lines[6].split()[:2] == [
        "held",
        "by",
    ]
    assert "* held out" in lines[-1]


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize(("clients", "classes"), [(3, 10), (60, 10), (1000, 62), (50, 200), (3, 20)])
def test_no_line_is_wider_than_the_window_and_few_are_printed(width: int, clients: int, classes: int) -> None:
    found = many(clients, classes)
    lines = list(heat_lines(found, width))
    assert max(line.cell_len for line in lines) <= max(
        width, 75
    )  # the hint on what is left out has 75 letters
    table = [line for line in lines if "more clients" not in line.plain and "square root" not in line.plain]
    assert max(line.cell_len for line in table) <= width
    heads = [line for line in lines if line.plain.strip().startswith("client")]
    assert len(lines) <= len(heads) * (min(clients, 40) + 6) + 2
    if clients > 40:
        assert f"{clients - 40} more clients" in "\n".join(line.plain for line in lines).replace(",", "")
        assert len(list(heat_lines(found, width, everybody=True))) >= len(heads) * clients


def test_shades_stand_for_counts() -> None:
    found = holdings(
        name="synthetic",
        options={"samples": 4000, "classes": 40, "shape": [2]},
        clients=4,
        partition="single-label",
    )
    lines = [line.plain for line in heat_lines(found, 70)]
    assert lines[1].split()[1] == "█" + "·" * 39 and lines[4].split()[1] == "···█" + "·" * 36
    assert lines[0].split() == ["client", "0", "10", "20", "30", "samples"]


def test_the_page_stands_alone_and_has_every_number() -> None:
    found = holdings(clients=50, partition={"name": "dirichlet", "beta": 0.5, "min_samples": 1}, held_out=3)
    text = render(found)
    seen = Balanced(text)
    assert (
        seen.links == [] and "script" not in seen.tags and not re.search(r"https?:|@import|url\((?!#)", text)
    )
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text
    told = {
        (int(c), int(k)): int(n) for c, k, n in re.findall(r"client (\d+), class (\d): (\d+) samples", text)
    }
    assert told == {
        (int(c), int(k)): int(found.counts[c, k]) for c, k in zip(*np.nonzero(found.counts), strict=True)
    }
    assert seen.tags["svg"] == 2 and found.federation.digest in text  # two bands of at most forty


def test_class_names_are_escaped_and_used() -> None:
    text = render(named())
    Balanced(text)
    assert "&lt;b&gt;&amp;" in text and "<b>&" not in text.replace("<b>&lt;", "") and "walking upstai" in text
    assert "walki…" in next(iter(heat_lines(named(), 80))).plain


def test_a_page_of_very_many_cells_shows_some_and_says_so() -> None:
    text = render(many(700, 100))
    assert "The first 600 of 700 clients." in text and "client 599, " in text and "client 600, " not in text


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (20, 10), (300, 62), (2500, 3)])
def test_pictures_of_all_sizes(clients: int, classes: int, tmp_path: Path) -> None:
    found = many(clients, classes)
    write_heat_map(found, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG" and 1000 < picture.width < 5000 and 200 < picture.height < 3000
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_a_picture_is_dark_where_there_are_samples() -> None:
    from matplotlib.figure import Figure

    found = holdings(clients=10, partition="single-label")
    figure = Figure()
    holdings_drawing(found).draw(figure)
    (image,) = figure.axes[0].images
    assert np.array_equal(image.get_array(), found.counts.T)
    shades = image.cmap(image.norm(found.counts.T))[..., :3].mean(-1)
    assert shades[found.counts.T > 0].max() < 0.5 < shades[found.counts.T == 0].min()


def test_nothing_to_show_is_shown() -> None:
    empty = holdings("validation")
    assert empty.counts.sum() == 0 and "0 validation samples" in dict(empty.described())["a client"]
    assert (
        file_content([holdings_drawing(empty)], "png").startswith(b"\x89PNG")
        and "The strongest shade is 0" in render(empty)
        and list(heat_lines(empty, 80))
    )

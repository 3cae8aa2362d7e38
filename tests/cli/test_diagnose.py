"""`holdfast diagnose` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from holdfast.cli import main
from holdfast.results.run import Run

ATTACK = {"name": "ipm", "fraction": 0.34}


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def go(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["diagnose", *map(str, args)])
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return go


def test_tables_are_listed_and_one_is_shown(
    simulate: Callable[..., Run], ask: Callable, tmp_path: Path
) -> None:
    run = simulate(method="fedcap", attack=ATTACK, train={"rounds": 2})
    code, out, _ = ask(run.path)
    assert code == 0 and all(f"\n{name}  " in f"\n{out}" for name in ("customisation", "seconds", "grad-cam"))
    assert set(json.loads(ask(run.path, "--json")[1])) == {*run.tables, "rank-change", "top-fim", "grad-cam"}

    files = [tmp_path / f"norms.{ending}" for ending in ("csv", "png", "html")]
    code, out, _ = ask(run.path, "norms", *(word for file in files for word in ("--out", file)))
    assert (
        code == 0
        and out.splitlines()[0] == "norms: fedcap under ipm"
        and out.splitlines()[-3:] == list(map(str, files))
    )
    pd.testing.assert_frame_equal(pd.read_csv(files[0]), run.table("norms"))
    assert Image.open(files[1]).width == 1400 and "norms: fedcap under ipm" in files[2].read_text()
    assert len(json.loads(ask(run.path, "customisation", "--json")[1])) == len(run.table("customisation"))


def test_refusals_are_one_line(simulate: Callable[..., Run], ask: Callable, tmp_path: Path) -> None:
    run = simulate(train={"rounds": 1})
    for args, message in {
        (
            "customisation",
        ): "has no 'customisation'; it has norms, weights, seconds, bytes, rank-change, top-fim, grad-cam",
        ("norms", "--out", "norms.gif"): "--out: norms.gif must end in .csv, .png, .pdf, .svg or .html",
        ("norms", "--out", tmp_path / "nowhere" / "a.png"): "--out: there is no folder",
        ("norms", "--open"): "--open: name the page with --out FILE.html",
        ("--out", tmp_path / "a.png"): "WHAT is missing: name the table to write",
        ("grad-cam",): "needs a network with a convolution",
        ("grad-cam", "--beside", run.path): "--beside: two runs have the same folder name",
        ("rank-change",): "train.rounds: importance ranks change from the second round on",
        ("top-fim", "--share", "2"): "share is a part of the parameters",
    }.items():
        code, out, err = ask(run.path, *args)
        assert code == 2 and out == "" and message in err and len(err.splitlines()) == 1, (args, err)
    assert ask(tmp_path, "norms")[0] == 2


def test_where_two_models_look(simulate: Callable[..., Run], ask: Callable, tmp_path: Path) -> None:
    common = {
        "model": {"name": "lenet", "margin": 4},
        "attack": {"name": "backdoor", "size": 2, "fraction": 0.4},
        "train": {"rounds": 1},
    }
    runs = [simulate(**common), simulate(aggregator="median", **common)]
    file, page = tmp_path / "looks.png", tmp_path / "looks.html"
    code, out, _ = ask(
        runs[0].path,
        "grad-cam",
        "--beside",
        runs[1].path,
        "--image",
        4,
        "--image",
        6,
        "--out",
        file,
        "--out",
        page,
    )
    assert (
        code == 0
        and out.count(runs[1].path.name) >= 2
        and "The images carry the trigger." in page.read_text()
    )
    width, height = Image.open(file).size
    assert width == 10 + 3 * 146 and height == 32 + 2 * 146  # an image and two models across, two images down
    assert "trigger" not in json.dumps(json.loads(ask(runs[0].path, "grad-cam", "--clean", "--json")[1]))


def test_rank_changes_are_drawn(simulate: Callable[..., Run], ask: Callable, tmp_path: Path) -> None:
    run = simulate(attack={"name": "label-flip", "fraction": 0.34}, train={"rounds": 4})
    code, out, _ = ask(
        run.path, "rank-change", "--rounds", 3, "--out", tmp_path / "a.csv", "--out", tmp_path / "a.png"
    )
    frame = pd.read_csv(tmp_path / "a.csv")
    assert (
        code == 0
        and set(frame["round"]) <= {2, 3}
        and (frame["disparity"] - frame["poisoned"] + frame["benign"]).abs().max() < 1e-12
    )
    picture = Image.open(tmp_path / "a.png")
    assert (picture.width, picture.height) == (1400, 2 * 680)  # both figures, one above the other

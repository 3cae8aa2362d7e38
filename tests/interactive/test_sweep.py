"""A sweep in Python: a list of cells, a frame, the best cell, a figure, a page; the same opened again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import holdfast
from holdfast.core.errors import ConfigError, RunError
from holdfast.interactive.best_setting import best_setting
from holdfast.interactive.sweep import Sweep
from holdfast.methods.ditto import Ditto
from tests.experiment.sessions import TINY

LABELS = [
    f"{method} seed={seed}" for method in ("fedavg", "ditto lam=0.5", "fedprox mu=0.1") for seed in (0, 1)
]


def test_it_is_a_list_of_its_cells(sweep: Sweep) -> None:
    assert [cell.label for cell in sweep] == LABELS and len(sweep) == 6 and isinstance(sweep, list)
    assert sweep[2].run.manifest["config"]["method"] == {"name": "ditto", "lam": 0.5} | {
        name: value for name, value in Ditto().settings().items() if name != "lam"
    }
    assert [folder.name for folder in sorted(sweep.path.glob("0*"))][2] == "002-ditto_lam=0.5_seed=0"
    assert sweep[0].metrics.equals(sweep[0].run.metrics), "a cell has what its run has"
    assert [run.path.name[:3] for run in sweep.runs] == ["000", "001", "002", "003", "004", "005"]


def test_it_is_the_same_when_it_is_opened(sweep: Sweep) -> None:
    again = holdfast.open(sweep.path)
    assert isinstance(again, Sweep) and again.frame.equals(sweep.frame)
    assert repr(again) == f"Sweep(6 cells, 6 finished: {sweep.path})"
    assert isinstance(holdfast.open(sweep[0].run.path), holdfast.Run)


def test_the_same_call_continues_it_with_objects_that_are_made_again(sweep: Sweep) -> None:
    again = holdfast.sweep(
        TINY,
        out=sweep.path,
        method=["fedavg", Ditto(lam=0.5), {"name": "fedprox", "mu": 0.1}],
        seed=[0, 1],
    )
    assert [cell.final for cell in again] == [cell.final for cell in sweep]


def test_its_frame_has_the_settings_that_differ_and_the_final_figures(sweep: Sweep) -> None:
    frame = sweep.frame
    assert list(frame.columns[:3]) == ["label", "status", "round"]
    assert frame["method"].tolist() == ["fedavg", "fedavg", "ditto", "ditto", "fedprox", "fedprox"]
    assert frame["seed"].tolist() == [0, 1] * 3 and "train.lr" not in frame
    assert frame["accuracy"].tolist() == [cell.final["accuracy"] for cell in sweep]


def test_its_frame_says_none_where_a_cell_has_no_attack(tmp_path: Path) -> None:
    names = [None, {"name": "ipm", "fraction": 0.5, "knows": "colluders"}]
    swept = holdfast.sweep(TINY, attack=names, train={"rounds": 1}, out=tmp_path / "s")
    assert swept.frame["attack"].tolist() == ["none", "ipm"]


def test_the_best_setting_is_that_of_the_best_mean_over_its_seeds(sweep: Sweep) -> None:
    means = sweep.frame.groupby("method")[["accuracy", "loss"]].mean()
    best = sweep.best()
    assert best.label.split()[0] == means["accuracy"].idxmax() and "seed" not in best.label
    assert best.mean == pytest.approx(means["accuracy"].max()) and len(best.cells) == 2
    assert f"accuracy {best.mean:.4f} on average over 2 seeds" in repr(best)
    assert best.run.path == best.cells[0].run.path and best.run.manifest["config"]["seed"] == 0
    assert sweep.best("loss").label.split()[0] == means["loss"].idxmin()
    single, figures = sweep.best(over=None), sweep.frame
    assert single.label == figures.loc[figures["accuracy"].idxmax(), "label"] and len(single.cells) == 1
    with pytest.raises(ConfigError, match="unknown metric 'acuracy'; did you mean 'accuracy'"):
        sweep.best("acuracy")
    with pytest.raises(ConfigError, match="over must be"):
        sweep.best(over="method")


def test_a_setting_with_unfinished_seeds_is_not_the_best() -> None:
    def cell(label: str, status: str, accuracy: float) -> holdfast.SweepCell:
        run = SimpleNamespace(final={"accuracy": accuracy}, accuracy=accuracy)
        return holdfast.SweepCell(label, status, 1, None, run)  # type: ignore[arg-type]

    lucky = [cell("a 0", "diverged", 0.1), cell("a 1", "finished", 0.9)]
    steady = [cell("b 0", "finished", 0.7), cell("b 1", "finished", 0.8)]
    assert best_setting([("a", lucky), ("b", steady)], "accuracy", Path("s")).label == "b"
    alone = best_setting([("a", lucky)], "accuracy", Path("s"))
    assert repr(alone) == "BestSetting('a', accuracy 0.9000 on average over 1 of 2 seeds)"
    assert alone.run.accuracy == 0.9


def test_settings_are_compared_over_their_seeds(sweep: Sweep) -> None:
    frame = sweep.compare("fedavg")
    assert len(frame) == 2 and frame["seeds"].tolist() == [2, 2]
    assert frame["label"][0] == "ditto lam=0.5 − fedavg" and frame["against"].tolist() == ["fedavg"] * 2
    means = sweep.frame.groupby("method")["accuracy"].mean()
    assert frame["difference"][0] == pytest.approx(means["ditto"] - means["fedavg"])
    assert {"low", "high", "p", "p_holm", "p_signed_rank", "p_signed_rank_holm"} <= set(frame)
    assert "at least 3 finished seeds" in frame.attrs["notes"][0]


def test_its_figure_has_a_line_for_every_setting(sweep: Sweep) -> None:
    pytest.importorskip("matplotlib")
    figure = sweep.plot("loss")
    labels = [text.get_text() for text in figure.subfigs[0].axes[0].get_legend().get_texts()]
    assert labels == ["fedavg", "ditto lam=0.5", "fedprox mu=0.1"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_its_page(sweep: Sweep) -> None:
    page = sweep.report()
    assert page == sweep.path / "report.html" and "ditto lam=0.5" in page.read_text()


def test_a_notebook_shows_it_escaped(sweep: Sweep) -> None:
    assert '<td style="text-align:left">ditto lam=0.5 seed=0</td>' in sweep._repr_html_()
    evil = holdfast.SweepCell("<script>x</script>", "begun", 1, None, None)
    shown = Sweep("a&b", [evil])._repr_html_()
    assert "<script>" not in shown and "a&amp;b" in shown


def test_a_cell_that_has_not_begun_says_so() -> None:
    cell = holdfast.SweepCell("a", "not begun", 0, None, None)
    with pytest.raises(RunError, match="cell 'a' has no metrics: it is not begun"):
        cell.metrics  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'metrix'"):
        cell.metrix  # noqa: B018


def test_a_sweep_with_the_labels_of_an_earlier_version_continues(tmp_path: Path) -> None:
    """Its folders and labels stay as they are."""
    given = {**TINY, "sweep": {"method": [{"name": "ditto", "lam": 0.1}, {"name": "fedprox", "mu": 0.1}]}}
    first = holdfast.sweep(given, out=tmp_path / "s")
    file = tmp_path / "s" / "sweep.json"
    text = file.read_text()
    for cell, old in zip(
        first, ("method={'name': 'ditto', 'lam': 0.1}", "method={'name': 'fedprox', 'mu': 0.1}"), strict=True
    ):
        text = text.replace(json.dumps(cell.label), json.dumps(old))
        folder = cell.run.path.with_name(f"{cell.run.path.name[:3]}-old")
        text = text.replace(json.dumps(cell.run.path.name), json.dumps(folder.name))
        cell.run.path.rename(folder)
        group = tmp_path / "s" / "groups" / "000.json"
        group.write_text(group.read_text().replace(cell.run.path.name, folder.name))
    file.write_text(text)
    (tmp_path / "s" / "001-old" / "result.json").unlink()
    for again in (holdfast.resume(tmp_path / "s"), holdfast.sweep(given, out=tmp_path / "s")):
        assert [cell.status for cell in again] == ["finished"] * 2
        assert again[0].label == "method={'name': 'ditto', 'lam': 0.1}"
    assert sorted(path.name for path in (tmp_path / "s").glob("0*")) == ["000-old", "001-old"]
    with pytest.raises(ConfigError, match="holds another sweep"):
        holdfast.sweep(given, out=tmp_path / "s", train={"rounds": 3})


def test_a_folder_of_runs_is_opened_as_a_sweep(sweep: Sweep, tmp_path: Path) -> None:
    holdfast.run(TINY, out=tmp_path / "runs" / "a")
    holdfast.run(TINY, out=tmp_path / "runs" / "b", seed=1)
    both = holdfast.open(tmp_path / "runs")
    assert isinstance(both, Sweep) and both.frame["seed"].tolist() == [0, 1]
    with pytest.raises(ConfigError, match="holds no run and no sweep"):
        holdfast.open(tmp_path)

"""Tables and figures that leave the page say what the page says."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from markupsafe import Markup
from PIL import Image

from holdfast.cli import main
from holdfast.core.errors import ConfigError
from holdfast.report import plots
from holdfast.report.axis import Axis
from holdfast.report.drawing import figure_of, file_content
from holdfast.report.figure_files import write_figures
from holdfast.report.markup import Section
from holdfast.report.numbers import amount
from holdfast.report.page import all_sections
from holdfast.report.read_runs import by_setting, read_records
from holdfast.report.table import Entry, Table, to_markdown
from holdfast.report.table_exports import export, tex, to_latex


def test_latex_is_booktabs_and_nothing_in_it_is_a_command() -> None:
    table = Table(
        ("", "lost %"),
        ((Entry("a_b & \\x{1}"), Entry("94.6 ± 0.4 %", 0.946, True)), (Entry("c"), Entry("−1.0 %", -0.01))),
    )
    assert (
        to_latex(table)
        == "\\begin{tabular}{lr}\n\\toprule\n & lost \\% \\\\\n\\midrule\na\\_b \\& \\textbackslash{}x\\{1\\}"
        " & \\textbf{94.6 $\\pm$ 0.4 \\%} \\\\\nc & $-$1.0 \\% \\\\\n\\bottomrule\n\\end{tabular}\n"
    )
    assert tex("a\nb ~^") == "a b \\textasciitilde{}\\textasciicircum{}"
    assert tex("<i> | −1") == "\\textless{}i\\textgreater{} \\textbar{} $-$1"


def test_no_name_is_an_element_of_a_markdown_page() -> None:
    text = to_markdown(Table(("", "p"), ((Entry("<script>x</script>"), Entry("< 0.001")),)))
    assert "| &lt;script>x&lt;/script> | < 0.001 |" in text


def test_csv_has_plain_numbers(duel: Path) -> None:
    lines = by_setting(read_records(duel))
    rows = list(csv.DictReader(io.StringIO(export(lines, "csv"))))
    assert [(row["setting"], row["attack"]) for row in rows[:3]] == [
        ("fedavg", "no attack"),
        ("fedavg", "ipm"),
        ("fedavg", "sign-flip"),
    ]
    for line, row in zip(lines, rows, strict=True):
        assert float(row["accuracy"]) == line.mean("accuracy") and float(row["accuracy std"]) == line.spread(
            "accuracy"
        )
        assert (
            float(row["sent"]) == (line.mean("bytes/up") or 0) + (line.mean("bytes/down") or 0)
            and row["seeds"] == "2"
        )
    assert rows[0]["lost"] == "" and float(rows[1]["lost"]) == lines[1].mean("attack/lost")


def test_markdown_and_latex_have_the_map_too(duel: Path) -> None:
    lines = by_setting(read_records(duel))
    assert "|  | no attack | ipm | sign-flip | worst case |" in export(lines, "md")
    assert " & no attack & ipm & sign-flip & worst case \\\\" in export(lines, "latex")
    with pytest.raises(ConfigError, match="--tables: there is md, latex, csv, not xls"):
        export(lines, "xls")


def test_every_chart_of_a_page_is_a_figure(duel: Path) -> None:
    names = [drawing.file_name for section in all_sections(read_records(duel)) for drawing in section.figures]
    assert names[0] == "accuracy-by-setting-and-attack" and "accuracy-under-ipm-by-round" in names
    assert "accuracy-of-every-client" in names and "training-samples-of-every-client-by-class" in names
    assert "fedcap-ipm-seed-0-every-client-over-the-rounds" in names and "seconds-of-every-setting" in names


@pytest.mark.parametrize(
    ("form", "begin"),
    [("svg", b"<?xml"), ("png", b"\x89PNG"), pytest.param("pdf", b"%PDF", marks=pytest.mark.slow)],
)
def test_figures_are_written_in_every_format(single: Path, tmp_path: Path, form: str, begin: bytes) -> None:
    sections = all_sections(read_records(single))
    paths = write_figures(sections, tmp_path / "a", form)
    assert len(paths) == sum(len(section.figures) for section in sections) >= 6
    again = write_figures(sections, tmp_path / "b", form)
    for path, other in zip(paths, again, strict=True):
        content = path.read_bytes()
        assert path.suffix == f".{form}" and content.startswith(begin) and content == other.read_bytes()
    if form == "png":
        colours = Image.open(paths[0]).convert("RGB").getcolors(1 << 20) or []
        assert Image.open(paths[0]).width > 1000 and len(colours) > 20


def test_a_label_is_text_and_no_formula(tmp_path: Path) -> None:
    drawing = plots.curves([("$x_1 <b>", [(1, 0.1, 0.1, 0.1), (2, 0.2, 0.2, 0.2)])], "a", True, "round", None)
    text = file_content([drawing], "svg").decode()
    assert "$x_1 &lt;b&gt;" in text and "<b>" not in text


def test_values_above_the_axis_are_marked_and_named() -> None:
    lines = [("high", [(1, 0.5, 0.5, 0.5), (2, 90.0, 90, 90), (3, 7.0, 7, 7)]), ("low", [(1, 1.0, 1, 1)])]
    drawing = plots.curves(lines, "loss", False, "round", Axis([0.0, 1.0, 2.0]))
    (axes,) = figure_of([drawing]).subfigs[0].axes
    triangles = next(line for line in axes.lines if line.get_marker() == "^")
    assert triangles.get_xdata().tolist() == [2, 3] and triangles.get_ydata().tolist() == [2, 2]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["high (▲ up to 90)", "low"]


def test_every_line_of_a_chart_has_its_own_colour_dash_or_mark() -> None:
    assert len({(plots.colour(i), plots.dash(i), plots.mark(i)) for i in range(28)}) == 28


def test_labels_of_a_byte_axis_keep_apart() -> None:
    rows = [("a setting with a long name", [200e3, 204e3])]
    figure = figure_of([plots.bars(rows, "Bytes", ["up", "down"], amount)])
    figure.canvas.draw()
    (axes,) = figure.subfigs[0].axes
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert len(boxes) >= 3 and all(a.x1 < b.x0 for a, b in pairwise(boxes))


def test_a_curve_has_the_numbers_of_the_run(single: Path) -> None:
    """The line that matplotlib draws has the accuracies of the run."""
    from matplotlib.figure import Figure

    records = read_records(single)
    drawing = next(
        drawing
        for section in all_sections(records)
        for drawing in section.figures
        if drawing.file_name == "accuracy-by-round"
    )
    figure = Figure()
    drawing.draw(figure)
    line = figure.axes[0].lines[0]
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == records[0].curve("accuracy")


def test_without_matplotlib_one_line_names_the_extra(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as done:
        main(["report", str(single), "--figures", str(tmp_path / "f")])
    error = capsys.readouterr().err.strip()
    assert done.value.code == 2 and error.count("\n") == 0
    assert "figures need matplotlib" in error and "pip install 'holdfast[figures]'" in error
    assert not (tmp_path / "f").exists()


@pytest.mark.slow
def test_a_page_needs_no_matplotlib(single: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from holdfast.report.page import render;"
        " from holdfast.report.read_runs import read_records;"
        f" render(read_records(Path({str(single)!r}))); sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_commands(single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def holdfast(*words: str) -> int:
        with pytest.raises(SystemExit) as done:
            main(["report", str(single), *words])
        return int(done.value.code or 0)

    assert holdfast("--tables", "latex", "--out", str(tmp_path / "t.tex")) == 0
    assert "\\toprule" in (tmp_path / "t.tex").read_text() and capsys.readouterr().out.strip() == str(
        tmp_path / "t.tex"
    )
    assert holdfast("--tables", "csv") == 0 and capsys.readouterr().out.startswith(
        "name,setting,attack,data,seeds,accuracy,accuracy std,"
    )
    assert holdfast("--figures", str(tmp_path / "f")) == 0
    written = capsys.readouterr().out.split()
    assert written and all(Path(path).suffix == ".svg" and Path(path).exists() for path in written)
    (tmp_path / "taken").touch()
    assert holdfast("--figures", str(tmp_path / "taken")) == 2
    assert "taken: cannot be made: File exists" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="choose svg, png or pdf, not gif"):
        write_figures([], tmp_path, "gif")
    with pytest.raises(ConfigError, match="no charts; --tables csv"):
        write_figures([Section("a", Markup())], tmp_path / "none")
    assert not (tmp_path / "none").exists()

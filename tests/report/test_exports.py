"""Tables and figures that leave the page say what the page says."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.core.errors import ConfigError
from holdfast.report.browser import VARIABLE
from holdfast.report.figure_files import figures, standalone, write_figures
from holdfast.report.page import render
from holdfast.report.read_runs import by_setting, read_cells
from holdfast.report.table import Entry, Table, to_markdown
from holdfast.report.table_exports import export, tex, to_latex


def test_latex_is_booktabs_and_nothing_in_it_is_a_command() -> None:
    table = Table(
        ("", "lost %"),
        ((Entry("a_b & \\x{1}"), Entry("94.6 ± 0.4 %", 0.946, True)), (Entry("c"), Entry("-1.0 %", -0.01))),
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
    lines = by_setting(read_cells(duel))
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
    lines = by_setting(read_cells(duel))
    assert "|  | no attack | ipm | sign-flip | worst case |" in export(lines, "md")
    assert " & no attack & ipm & sign-flip & worst case \\\\" in export(lines, "latex")
    with pytest.raises(ConfigError, match="--tables: there is md, latex, csv, not xls"):
        export(lines, "xls")


def test_a_figure_stands_by_itself(duel: Path) -> None:
    page = render(read_cells(duel))
    drawn = figures(page)
    names = [name[3:] for name in drawn]
    assert names[0] == "accuracy-by-setting-and-attack" and "accuracy-under-ipm-by-round" in names
    assert len(drawn) == page.count('<svg class="chart') + page.count('<div class="many">') >= 8
    for svg in drawn.values():
        root = ElementTree.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and float(root.attrib["width"]) > 100
        assert "var(" not in svg and not re.search(r"@media|:hover|url\((?!#)", svg)
    first = drawn["01-accuracy-by-setting-and-attack"]
    assert ".heat{fill: #0b5f96}" in first and ".banned" not in first


def test_the_small_charts_of_clients_are_one_figure(single: Path) -> None:
    page = render(read_cells(single))
    drawn = figures(page)
    (name,) = [name for name in drawn if name.endswith("every-client-over-the-rounds")]
    assert list(drawn).index(name) < len(drawn) - 1  # where the page has it
    root = ElementTree.fromstring(drawn[name])
    groups = root.findall("{http://www.w3.org/2000/svg}g")
    assert len(groups) == 4 and len({group.attrib["transform"] for group in groups}) == 4
    assert [group.find("{http://www.w3.org/2000/svg}text").text for group in groups] == ["0", "1", "2", "3"]  # type: ignore[union-attr]
    assert (
        ".many path.own{fill: none;stroke: #" in drawn[name]
        and "grid" not in drawn[name]
        and "var(" not in drawn[name]
    )


def test_only_what_concerns_a_chart_goes_with_it() -> None:
    style = (
        ":root { --a: #123456; } @media print { .x { fill: red; } } .x, .y { fill: var(--a); width: 3px }"
        " .x:hover { fill: blue; }"
    )
    svg = standalone('<svg class="chart" viewBox="0 0 10 20"><rect class="x"/></svg>', style)
    assert (
        ".x{fill: #123456}</style>" in svg
        and 'viewBox="-12 -12 34 44"' in svg
        and "red" not in svg
        and "blue" not in svg
    )


def test_the_commands(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setenv(VARIABLE, "no-such-browser")
    assert holdfast("--figures", str(tmp_path / "g"), "--format", "png") == 2
    assert "no browser is at hand: install chromium" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="svg and png, not gif"):
        write_figures("", tmp_path, "gif")
    with pytest.raises(ConfigError, match="no charts; --tables csv"):
        write_figures("<table></table>", tmp_path / "none")
    assert not (tmp_path / "none").exists()

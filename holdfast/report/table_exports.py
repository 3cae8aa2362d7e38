"""The tables of a page for papers and for other programs: Markdown, LaTeX with booktabs, and CSV with plain
numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from holdfast.core.errors import ConfigError
from holdfast.report.read_runs import SettingRuns
from holdfast.report.settings_by_attack import SettingsByAttack
from holdfast.report.table import WORDS, Entry, Table, columns, tabulate, to_markdown

FORMATS = ("md", "latex", "csv")
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "★": r"$\star$",
}
_SPECIAL |= {
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "−": "$-$",
}  # of which LaTeX's oldest fonts make others
_SPECIAL |= {letter: "\\" + letter for letter in "&%$#_{}"}


def export(lines: Sequence[SettingRuns], form: str) -> str:
    """All tables of the page in Markdown or LaTeX. A CSV file holds one table, so there the rows carry
    setting, attack and data instead."""
    if form not in FORMATS:
        raise ConfigError(f"--tables: there is {', '.join(FORMATS)}, not {form}")
    if form == "csv":
        return to_csv(lines)
    grids = SettingsByAttack(lines).grids
    titled = [("", tabulate(lines)), *((f"Accuracy by attack, {grid.data}", grid.table()) for grid in grids)]
    if form == "md":
        return "\n".join(
            f"{title}\n\n{to_markdown(table)}" if title else to_markdown(table) for title, table in titled
        )
    return "\n".join(
        (f"% {tex(title)}\n" if title else "% Needs \\usepackage{booktabs}.\n") + to_latex(table)
        for title, table in titled
    )


def to_latex(table: Table) -> str:
    """A tabular of booktabs; the best of a column is bold."""
    sides = "l" + "".join("l" if title in WORDS else "r" for title in table.titles[1:])
    out = [
        rf"\begin{{tabular}}{{{sides}}}",
        r"\toprule",
        " & ".join(tex(title) for title in table.titles) + r" \\",
        r"\midrule",
    ]
    for row in table.rows:
        out.append(" & ".join(_tex_entry(entry) for entry in row) + r" \\")
    return "\n".join([*out, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _tex_entry(entry: Entry) -> str:
    text = tex(entry.text)
    return rf"\textbf{{{text}}}" if entry.best else text


def tex(text: str) -> str:
    """Text of a run as LaTeX sets it: nothing in it is a command."""
    return "".join(_SPECIAL.get(letter, letter) for letter in " ".join(text.split()))


def to_csv(lines: Sequence[SettingRuns]) -> str:
    """A row per line: shares as fractions, bytes and seconds as they are, and the standard deviation over
    seeds beside every mean."""
    table, shown = tabulate(lines), columns(lines)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = [head for column in shown for head in (column.title, f"{column.title} std")]
    writer.writerow(["name", "setting", "attack", "data", "seeds", *heads, "status"])
    for faced, row in zip(SettingsByAttack(lines).faced, table.rows, strict=True):
        figures = [value for entry in row[1 : len(shown) + 1] for value in (entry.value, entry.spread)]
        plain = ["" if value is None else repr(float(value)) for value in figures]
        writer.writerow(
            [
                faced.line.label,
                faced.setting,
                faced.attack,
                faced.data,
                faced.line.seeds,
                *plain,
                faced.line.status,
            ]
        )
    return out.getvalue()

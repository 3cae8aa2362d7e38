"""`holdfast list` and `holdfast show` describe the parts that a config can name, and their settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from holdfast.cli.app import AsJson, Plugins, app, load_plugins, only_json, print_json, reflow, to_stdout
from holdfast.core.errors import ConfigError, suggest


def complete_kind(begun: str) -> list[str]:
    """For the shell: kinds of parts."""
    from holdfast.core.registry import KINDS

    return [kind for kind in KINDS if kind.startswith(begun)]


def complete_name(begun: str) -> list[str]:
    """For the shell: names of all parts. It imports torch, which takes a second or two."""
    from holdfast.core.registry import KINDS, parts

    names = {"config", *(name for kind in KINDS for name in parts(kind))}
    return sorted(name for name in names if name.startswith(begun))


@app.command("list")
def list_parts(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="Kind of part; without it, all kinds.", show_default=False, autocompletion=complete_kind
        ),
    ] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """List the parts of a kind: name, summary and paper.

    KIND is method, aggregator, wrapper, detector, server (optimiser), attack, trigger (of a backdoor),
    partition, source, model, loss, optimizer or schedule. Without it, the command counts the parts of every
    kind.

    \b
    Examples:
      holdfast list
      holdfast list methods

    """
    from holdfast.core.registry import KINDS, describe, parts

    with only_json(as_json):
        load_plugins(plugin)
    if kind is None:
        rows: list[dict[str, Any]] = [
            {"kind": k, "count": len(parts(k)), "names": list(parts(k))} for k in KINDS
        ]
        shown = [(row["kind"], str(row["count"]), ", ".join(row["names"])) for row in rows]
        return print_json(rows) if as_json else _print_rows(("kind", "", "names"), shown)
    singular = (
        kind
        if kind in KINDS
        else kind.removesuffix("es")
        if kind.removesuffix("es") in KINDS
        else kind.removesuffix("s")
    )
    if singular not in KINDS:
        raise ConfigError(f"unknown kind of part '{kind}'{suggest(singular, KINDS)}")
    found = [describe(part) for part in parts(singular).values()]
    if as_json:
        return print_json(found)
    if not found:
        return print(f"no {singular} is registered; a plug-in can add one (--plugin FILE)")
    _print_rows(
        ("name", "summary", "paper"), [(card["name"], card["summary"], card["paper"]) for card in found]
    )


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name of a part, or `config` for all settings of a config file.",
            autocompletion=complete_name,
        ),
    ],
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Describe a part: what it does, its settings with their defaults, its paper, an example config.

    \b
    Examples:
      holdfast show ditto
      holdfast show config
    """
    from holdfast.cli.part_text import example
    from holdfast.core.registry import KINDS, describe, parts
    from holdfast.local.optimizers.torch_class import torch_name, torch_part

    with only_json(as_json):
        load_plugins(plugin)
    if name == "config":
        return _show_config(as_json)
    known = {kind: parts(kind) for kind in KINDS}
    found = [describe(known[kind][name]) for kind in KINDS if name in known[kind]]
    if not found and torch_name(name) is not None:
        found = [describe(torch_part(name))]
    if not found:
        names = {"config", *(n for parts_of_kind in known.values() for n in parts_of_kind)}
        raise ConfigError(f"no part is called '{name}'{suggest(name, names)}")
    for card in found:
        card["example"] = example(card)
    if as_json:
        return print_json(found[0] if len(found) == 1 else found)
    for card in found:
        _print_card(card)


def _print_card(card: dict[str, Any]) -> None:
    console = to_stdout()
    console.print(Text.assemble((card["name"], "bold"), f"  {card['kind']}  ", (card["module"], "dim")))
    console.print()
    for paragraph in reflow(card["text"]).splitlines():
        console.print(paragraph, markup=False)
    if card["paper"]:
        console.print(f"\nPaper: {card['paper']}", markup=False)
    console.print("\n[bold]Settings[/bold]" if card["settings"] else "\nNo settings.")
    if card["settings"]:
        _print_settings(card["settings"])
    for place, (name, values) in enumerate(card["search"].items()):
        console.print(
            f"{'' if place else chr(10)}`holdfast tune` tries {name} = {', '.join(map(str, values))}",
            markup=False,
        )
    console.print("\n[bold]Example[/bold]")
    console.print(card["example"], markup=False, highlight=False, soft_wrap=True)  # to be copied


def _show_config(as_json: bool) -> None:
    from holdfast.cli.part_text import fields_of, section_help

    sections = fields_of()
    if as_json:
        return print_json(sections)
    console = to_stdout()
    console.print(
        "Every setting of a config file, with its default; the same keys work with --set and in Python.\n",
        markup=False,
    )
    for section, fields in sections.items():
        console.print(f"[{section}]" if section else "top level", style="bold", markup=False)
        if about := section_help(section):
            console.print(f"{about[0].upper()}{about[1:]}.", markup=False)
        _print_settings(fields)
        console.print()
    console.print("[sweep]", style="bold", markup=False)
    console.print(
        'Lists make a grid of experiments that run together: "method.name" = ["fedavg", "ditto"], seed = [0,'
        " 1, 2].",
        markup=False,
    )
    console.print(
        "[[sweep.override]] with the tables `when` and `set` changes settings of some of them.\n",
        markup=False,
    )
    console.print("[tune]", style="bold", markup=False)
    console.print(
        'Values that `holdfast tune` tries: "train.lr" = [0.01, 0.1] for every method; lam = [0.1, 1] under'
        " [tune.ditto] for one.",
        markup=False,
    )


def _print_settings(settings: list[dict[str, Any]]) -> None:
    rows = [
        (s["name"], "required" if s["required"] else _value(s["default"]), s["type"], s["help"])
        for s in settings
    ]
    _print_rows(("", "default", "type", "meaning"), rows)


def _value(given: Any) -> str:
    if given is None:
        return "–"
    return given if isinstance(given, str) else json.dumps(given, default=str)


def _print_rows(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, title in enumerate(titles):
        table.add_column(title, no_wrap=place == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style="bold" if place == 0 else "") for place, cell in enumerate(row)))
    to_stdout().print(table)

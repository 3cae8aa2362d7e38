"""Pages of the reference, from the code: the Python API, every part, every field of a config, every
command."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import typer

import holdfast
from holdfast.cli import app
from holdfast.cli.app import reflow, restore_argument_help
from holdfast.cli.part_text import example, fields_of
from holdfast.core.registry import KINDS, describe, parts
from holdfast.interactive.run import INNER

PLURALS = {kind: kind + ("es" if kind.endswith("s") else "s") for kind in KINDS}
GUIDES = {
    "method": "methods.md",
    "aggregator": "aggregators.md",
    "wrapper": "wrappers.md",
    "attack": "attacks.md",
    "detector": "committee.md",
    "partition": "partitions.md",
    "source": "data.md",
    "model": "models.md",
    "optimizer": "optimizers.md",
    "server": "server-optimizers.md",
}
"""The page of docs/ that explains a kind of part."""
API = {
    "Run experiments": ("run", "sweep", "plan", "tune", "resume"),
    "Data and models of your own": ("Data", "Model"),
    "Results": ("open", "load", "Run", "Sweep", "SweepCell"),
    "Parts of your own": ("register", "setting", "Part", "load_plugin"),
    "Errors": ("HoldfastError",),
}
"""The order of the public names; others follow at the end."""
BASES = {
    "Methods": ("holdfast.methods.base", "holdfast.methods.context"),
    "What crosses between server and clients": ("holdfast.core.types",),
    "Aggregators": ("holdfast.aggregators.base",),
    "Wrappers": ("holdfast.wrappers.base",),
    "Detectors": ("holdfast.detectors.base",),
    "Attacks": ("holdfast.attacks.base",),
    "Partitions": ("holdfast.data.partitions.base",),
    "Sources of data": ("holdfast.data.sources.base",),
    "Trackers": ("holdfast.tracking.base",),
}


def pages() -> dict[str, str]:
    """All pages of the reference: place in the site to Markdown."""
    made = {
        "reference/api.md": _api(),
        "reference/base-classes.md": _bases(),
        "reference/config.md": _config(),
        "reference/cli.md": _cli(),
        "reference/parts/index.md": _all_parts(),
    }
    return made | {f"reference/parts/{kind}.md": _parts(kind) for kind in KINDS}


def navigation() -> list[Any]:
    """The entries of the reference in the navigation."""
    return [
        {"Python": "reference/api.md"},
        {"Base classes for parts": "reference/base-classes.md"},
        {"Config": "reference/config.md"},
        {"Command line": "reference/cli.md"},
        {
            "Parts": [
                "reference/parts/index.md",
                *({PLURALS[kind].capitalize(): f"reference/parts/{kind}.md"} for kind in KINDS),
            ]
        },
    ]


# ---- Python


def _api() -> str:
    public = {name for name in dir(holdfast) if not name.startswith("_")}
    groups = {title: [name for name in names if name in public] for title, names in API.items()}
    rest = sorted(public - {name for names in groups.values() for name in names})
    lines = [
        "# Python API",
        "",
        "Everything that `import holdfast` offers. Inner modules may change between versions.",
    ]
    for title, names in (groups | {"More": rest}).items():
        if names:
            lines += ["", f"## {title}"]
            lines += [
                f"\n::: holdfast.{name}\n    options:\n      heading_level: 3" + _hidden(name)
                for name in names
            ]
    return "\n".join(lines)


def _hidden(name: str) -> str:
    """Options of the page that leave out what only the library uses."""
    hidden = ["^_", *(f"^{inner}$" for inner in INNER)] if name == "Run" else []
    return f"\n      filters: {json.dumps(['!' + pattern for pattern in hidden])}" if hidden else ""


def _bases() -> str:
    lines = [
        "# Base classes for parts",
        "",
        "What a part of your own derives from. [Write a method](../tutorials/write-a-method.md) shows how it"
        " goes together, [writing-a-method.md](../writing-a-method.md) has all rules.",
    ]
    for title, modules in BASES.items():
        lines += ["", f"## {title}"]
        lines += [f"\n::: {module}\n    options:\n      heading_level: 3" for module in modules]
    return "\n".join(lines)


# ---- parts


def _all_parts() -> str:
    lines = [
        "# All parts",
        "",
        "A part is chosen by its name, in a config, on the command line and in Python. `holdfast list` prints"
        " these tables, `holdfast show NAME` the settings of one part. Settings, paper and example of a part"
        " are behind its link.",
    ]
    for kind in KINDS:
        cards = [describe(part) for part in _built_in(kind).values()]
        rows = [
            (f"[`{card['name']}`]({kind}.md#{card['name']})", _text(card["summary"]), _text(card["paper"]))
            for card in cards
        ]
        lines += [
            "",
            f"## {PLURALS[kind].capitalize()}",
            "",
            *_table(("name", "what it does", "paper"), rows),
        ]
    return "\n".join(lines)


def _parts(kind: str) -> str:
    lines = [f"# {PLURALS[kind].capitalize()}", ""]
    if kind in GUIDES:
        lines += [f"How they work and how to choose among them: [{GUIDES[kind]}](../../{GUIDES[kind]}).", ""]
    for name, part in _built_in(kind).items():
        lines += [f"## {name} {{ #{name} }}", "", *_card(describe(part))]
    return "\n".join(lines)


def _card(card: dict[str, Any]) -> list[str]:
    lines = [_text(reflow(card["text"])), ""]
    if card["paper"]:
        lines += [f"Paper: {_text(card['paper'])}", ""]
    lines += [*_settings(card["settings"]), ""] if card["settings"] else ["No settings.", ""]
    for name, values in card["search"].items():
        lines += [f"`holdfast tune` tries `{name}` = {', '.join(f'`{value}`' for value in values)}.", ""]
    return [*lines, "```toml", example(card), "```", ""]


def _built_in(kind: str) -> dict[str, Any]:
    return {name: part for name, part in parts(kind).items() if part.__module__.startswith("holdfast.")}


# ---- config


def _config() -> str:
    lines = [
        "# Config",
        "",
        "Every field of a config file, with its default. The same keys work with `--set`"
        ' (`--set train.rounds=20`) and as keyword sections in Python (`train={"rounds": 20}`).'
        " [config.md](../config.md) explains how they work together.",
    ]
    for section, fields in fields_of().items():
        lines += ["", f"## [{section}]" if section else "## Top level", "", *_settings(fields)]
    lines += [
        "",
        "## [sweep]",
        "",
        'Lists make a grid of experiments that run together: `"method.name" = ["fedavg", "ditto"]`,'
        " `seed = [0, 1, 2]`. `[[sweep.override]]` with the tables `when` and `set` changes settings of some"
        " of them ([sweeps.md](../sweeps.md)).",
        "",
        "## [tune]",
        "",
        'Values that `holdfast tune` tries: `"train.lr" = [0.01, 0.1]` for every method; `lam = [0.1, 1]`'
        " under `[tune.ditto]` for one ([tuning.md](../tuning.md)).",
    ]
    return "\n".join(lines)


def _settings(fields: Iterable[dict[str, Any]]) -> list[str]:
    rows = [
        (
            f"`{field['name']}`",
            "required" if field["required"] else _value(field["default"]),
            f"`{field['type']}`",
            _text(field["help"]),
        )
        for field in fields
    ]
    return _table(("setting", "default", "type", "meaning"), rows)


def _value(given: Any) -> str:
    if given is None or given == "":
        return "none"
    return f"`{given if isinstance(given, str) else json.dumps(given, default=str)}`"


# ---- command line


def _cli() -> str:
    root = typer.main.get_command(app)
    restore_argument_help(root)
    lines = [
        "# Command line",
        "",
        f"{_help(root.help)} `holdfast COMMAND --help` prints what stands here.",
        "",
    ]
    return "\n".join(lines + [line for command in _commands(root, "holdfast") for line in command])


def _commands(group: Any, path: str) -> Iterable[list[str]]:
    for name, command in group.commands.items():
        if not command.hidden:
            yield _command(command, f"{path} {name}")
            if hasattr(command, "commands"):
                yield from _commands(command, f"{path} {name}")


def _command(command: Any, path: str) -> list[str]:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    usage = [path, *(["COMMAND"] if hasattr(command, "commands") else map(_argument, arguments))]
    usage += ["[OPTIONS]"] if options else []
    summary, _, rest = _help(command.help).partition("\n\n")
    lines = [f"## {path}", "", summary, "", "```text", " ".join(usage), "```", "", rest, ""]
    if arguments:
        rows = [(f"`{_metavar(param)}`", _text(param.help or "")) for param in arguments]
        lines += [*_table(("argument", "meaning"), rows), ""]
    if options:
        rows = [(_option(param), _text(param.help or "") + _default(param)) for param in options]
        lines += [*_table(("option", "meaning"), rows), ""]
    return lines


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _argument(param: Any) -> str:
    several = "..." if param.nargs == -1 else ""
    return f"{_metavar(param)}{several}" if param.required else f"[{_metavar(param)}{several}]"


def _option(param: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
    kind = "" if param.is_flag else f" `{param.metavar or param.type.name.upper()}`"
    return names + kind


def _default(param: Any) -> str:
    plain = param.default is not None and not param.is_flag and not callable(param.default)
    return f" (default: `{param.default}`)" if plain and str(param.default) not in ("", "[]", "()") else ""


def _help(text: str | None) -> str:
    """The help of a command as Markdown: blocks that begin with \\b are examples to copy."""
    shown = []
    for block in re.split(r"\n{2,}", (text or "").strip().replace("\\[", "[")):
        if not block.startswith("\b"):
            shown.append(_text(block))
            continue
        lead, *rest = block.removeprefix("\b\n").splitlines()
        verbatim = [line.removeprefix("  ") for line in rest]
        shown.append("\n".join([_text(lead), "", "```console", *(f"$ {line}" for line in verbatim), "```"]))
    return "\n\n".join(shown)


# ---- Markdown


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return lines + [f"| {' | '.join(cell.replace(chr(10), ' ') for cell in row)} |" for row in rows]


def _text(text: str) -> str:
    """Plain text for Markdown: what looks like a tag, an emphasis or a column of a table is none of these.
    Text in backticks stays."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else _escaped(piece) for piece in pieces)


def _escaped(text: str) -> str:
    return html.escape(text, quote=False).replace("*", "\\*").replace("|", "\\|")

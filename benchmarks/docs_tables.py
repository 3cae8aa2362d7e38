"""Writes the tables of parts in docs/*.md from what the parts declare (`Part.in_docs`).

python -m benchmarks.docs_tables            # writes them
python -m benchmarks.docs_tables --check    # exits with 1 where a page is not current"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.core.errors import ConfigError
from holdfast.core.registry import Part, parts
from holdfast.core.types import Schema
from holdfast.experiment.config import make_config
from holdfast.experiment.loop import Experiment
from holdfast.privacy.protection import refused

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {
    "method": "methods.md",
    "aggregator": "aggregators.md",
    "wrapper": "wrappers.md",
    "detector": "wrappers.md",
    "server": "server-optimizers.md",
    "attack": "attacks.md",
    "trigger": "attacks.md",
    "sent": "privacy.md",
}
KINDS = {"sent": "method"}
"""The kind of the parts in a table, where the table is not called so."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "method": ("what travels", "what a client keeps", "personal model"),
    "aggregator": ("what it does", "needs", "weights returned", "variants and options", "paper"),
    "wrapper": ("what the rule sees", "what comes out", "from"),
    "detector": ("suspicious", "scores", "keeps, asks", "settings", "from"),
    "server": ("step", "settings, with their defaults"),
    "attack": ("what an attacker does", "knows (at least)", "settings, with their defaults"),
    "trigger": ("for", "what it changes", "settings, with their defaults"),
    "sent": ("a client sends", "what that says, beyond the update itself", "refused under [privacy]"),
}


def schemas(method: str) -> dict[str, Schema]:
    """What a client sends in each task of a method, for a small network."""
    data = {
        "name": "declared",
        "options": {"shape": [4], "classes": 3, "most": 100},
        "split": {"train": 0.6, "validation": 0.2, "test": 0.2},
    }
    for batch_norm in (False, True):  # some methods need it
        model = {"name": "mlp", "hidden": 4, "batch_norm": batch_norm}
        try:
            with TemporaryDirectory() as folder:
                experiment = Experiment(
                    make_config({"method": method, "data": data, "model": model}), Path(folder)
                )
            wire = experiment.run_context.wire()
            break
        except ConfigError:
            if batch_norm:
                raise
    tasks = sorted(experiment.rule.tasks, key=lambda task: (task != "train", task))
    return {task: experiment.rule.schema(task, wire) for task in tasks}


def _sent(cls: type[Part]) -> str:
    return _names(name for schema in schemas(cls.name).values() for name in schema)


def _refused(cls: type[Part]) -> str:
    return _names(name for task, schema in schemas(cls.name).items() for name in refused(schema, task))


def _names(names: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in dict.fromkeys(names))


COMPUTED: Mapping[str, Callable[..., str]] = {
    "needs": lambda cls: cls().condition,
    "knows (at least)": lambda cls: f"{cls.model_fields['knows'].default} ({cls.least})",
    "a client sends": _sent,
    "refused under [privacy]": _refused,
}
"""Columns that follow from what a part declares for its work."""


def table(kind: str) -> str:
    """The table of all built-in parts of a kind, as Markdown."""
    of = KINDS.get(kind, kind)
    head = (of, *COLUMNS[kind])
    built_in = {name: cls for name, cls in parts(of).items() if cls.__module__.startswith("holdfast.")}
    rows = [(f"`{name}`", *(_cell(cls, column) for column in head[1:])) for name, cls in built_in.items()]
    return "\n".join(_line(row) for row in (head, ["---"] * len(head), *rows))


def _cell(cls: type[Part], column: str) -> str:
    return COMPUTED[column](cls) if column in COMPUTED else cls.in_docs.get(column, "")


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def updated(page: str, kind: str) -> str:
    """The page with the table of this kind between its markers."""
    begin, end = f"<!-- table of parts: {kind} -->", "<!-- end of table -->"
    found = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}", page, re.S)
    if found is None:
        raise SystemExit(f"docs/{PAGES[kind]} has no line '{begin}' with '{end}' after it")
    return page[: found.start()] + f"{begin}\n{table(kind)}\n{end}" + page[found.end() :]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables of parts in docs/ from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not current")
    check = parser.parse_args().check
    old = []
    for kind, name in PAGES.items():
        page = (DOCS / name).read_text()
        if updated(page, kind) != page:
            old.append(name)
            if not check:
                (DOCS / name).write_text(updated(page, kind))
    if check and old:
        raise SystemExit(f"not current: {', '.join(old)}; run python -m benchmarks.docs_tables")


if __name__ == "__main__":
    main()

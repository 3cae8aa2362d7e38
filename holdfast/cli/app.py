"""What all commands share: the Typer app, consoles, options, one-line errors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from holdfast.core.errors import in_print
from holdfast.core.version import __version__

app = typer.Typer(
    name="holdfast",
    help="Federated learning that stays personal under heterogeneous data and stays upright under attack.",
    epilog="Start with `holdfast demo`, then `holdfast run`, then `holdfast show config`.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,  # Click does so itself
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help="Python file that registers parts of yours; repeatable."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one setting, for example train.lr=0.05; repeatable."
    ),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 ...", show_default=False)]
PlanName = Annotated[
    str | None,
    typer.Option(
        "--plan",
        help="How clients are trained: auto (measures), loop, vmap; on cuda captured-... or compiled-...",
    ),
]
PrecisionName = Annotated[
    str | None, typer.Option("--precision", help="Of matrix products on cuda: fp32, tf32 (default) or bf16.")
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", help="Processes that train side by side on a CPU; default: measured."),
]
Memory = Annotated[
    str | None, typer.Option("--memory", help="Bound on a stack of training clients, for example 2GB.")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder of Parquet datasets.")]
Retry = Annotated[
    bool, typer.Option("--retry", help="Try the cells that failed again, from their last committed round.")
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", metavar="NAME", help="Tell a tracker too: tensorboard, mlflow or wandb; repeatable."
    ),
]
Opened = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"holdfast {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def complain(text: str) -> int:
    """One line on stderr; the exit code that goes with it."""
    print("error: " + " ".join(in_print(text).split()), file=sys.stderr)
    return 2


def cell(said: str) -> Text:
    """The same for Rich's tables, which read a bare string as markup: one from outside could plant links, or
    end in a traceback."""
    return Text(in_print(said))


def print_line(console: Console, said: str) -> None:
    """The same for a whole line."""
    console.print(cell(said), soft_wrap=True)


def to_stdout() -> Console:
    """Tables; wide enough when nobody is looking, so that a pipe gets whole lines."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return Console(width=wide, highlight=False, emoji=False)


def to_stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def print_json(content: Any) -> None:
    from holdfast.core.files import clean

    print(json.dumps(clean(content), indent=1, default=str))


@contextlib.contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """While a command works, what a plug-in or a library prints goes to stderr, if stdout is promised to
    JSON."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def load_plugins(files: list[Path] | None) -> None:
    from holdfast.core.registry import load_plugin

    for file in files or []:
        load_plugin(file)


def open_page(page: Path) -> None:
    import webbrowser

    webbrowser.open(page.resolve().as_uri())

"""Parts that all commands share: the Typer app, consoles, options, one-line errors."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.utils import get_params_from_function

from holdfast.core.errors import ConfigError, in_print
from holdfast.core.version import __version__

app = typer.Typer(
    name="holdfast",
    help="Federated learning that stays personal under heterogeneous data and stays upright under attack.",
    epilog="Start with `holdfast demo`, then `holdfast run`, then `holdfast show config`.",
    no_args_is_help=True,
    suggest_commands=False,  # Click does it already
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE", help="Python file that registers your own parts; repeatable."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one setting, for example train.lr=0.05; repeatable."
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", help="Device to train on: cpu, cuda, cuda:1 ...", show_default=False)
]
PlanName = Annotated[
    str | None,
    typer.Option(
        "--plan",
        help="How clients are trained: one by one (loop), as one batch (vmap), or the faster by timing"
        " (auto); on cuda also captured-loop, captured-vmap, compiled-loop, compiled-vmap.",
    ),
]
PrecisionName = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="Precision of matrix products on cuda: fp32, tf32 (default) or bf16; bf16-activations: of all"
        " that layers hand on.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", help="Number of CPU processes that train in parallel; default: the fastest, by timing."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option("--memory", help="Memory limit for clients that train together, for example 2GB."),
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder with Parquet datasets.")]
Retry = Annotated[
    bool, typer.Option("--retry", help="Run failed cells again, from their last committed round.")
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", metavar="NAME", help="Also log to a tracker: tensorboard, mlflow or wandb; repeatable."
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Run on Ray: on a cluster started here, or on that at HOST:PORT (auto: this machine's).",
        show_default=False,
    ),
]
RayInterval = Annotated[
    float | None,
    typer.Option(
        "--ray-interval",
        metavar="SECONDS",
        help="How often committed rounds come back from Ray's workers; default: 30.",
        show_default=False,
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="LIST",
        help="One process for each device of this machine: all (GPUs), cuda:0,cuda:1 or cpu:2. The cells of a"
        " sweep train side by side; the clients of a single run are shared out.",
        show_default=False,
    ),
]
Explain = Annotated[bool, typer.Option("--explain", help="Also say what each column of the table means.")]
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
    """Print one error line on stderr and return its exit code, 2."""
    print("error: " + " ".join(in_print(text).split()), file=sys.stderr)
    return 2


def plain_text(text: str) -> Text:
    """Make printable text for Rich, which reads a bare string as markup: text from a file could contain
    links, or markup that cannot be parsed."""
    return Text(in_print(text))


def print_line(console: Console, text: str) -> None:
    """Print one line of plain text."""
    console.print(plain_text(text), soft_wrap=True)


def to_stdout() -> Console:
    """Return a console for tables; 160 columns wide where stdout is not a terminal, so a pipe gets whole
    lines."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return Console(width=wide, highlight=False, emoji=False)


def to_stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def print_json(content: Any) -> None:
    from holdfast.core.files import clean

    print(json.dumps(clean(content), indent=1, default=str))


@contextlib.contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """Send what a plug-in or a library prints to stderr, if stdout is reserved for JSON."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def load_plugins(files: list[Path] | None) -> None:
    from holdfast.core.registry import load_plugin

    for file in files or []:
        load_plugin(file)


def reflow(text: str) -> str:
    """Join the lines of each paragraph of a docstring, so that the terminal wraps them. Indented lines and
    blocks that begin with \\b keep their line breaks."""
    joined: list[str] = []
    verbatim = False
    for line in inspect.cleandoc(text).splitlines():
        verbatim = line == "\b" or (verbatim and line != "")
        continues = bool(joined) and joined[-1] != "" and not joined[-1].startswith(" ")
        if continues and line and not verbatim and not line.startswith((" ", "* ")):
            joined[-1] += f" {line}"
        else:
            joined.append(line)
    return "\n".join(joined)


def reflow_help(of: typer.Typer) -> None:
    """Reflow the help of all commands, which is their docstring; Typer keeps line breaks inside
    paragraphs."""
    for command in of.registered_commands:
        command.help = reflow(command.help or getattr(command.callback, "__doc__", None) or "")
    for group in of.registered_groups:
        if group.typer_instance is not None:
            reflow_help(group.typer_instance)


def restore_argument_help(command: Any) -> None:
    """Set the help of arguments, which Typer 0.20 loses under Click 8.5, of a command and its subcommands."""
    for subcommand in getattr(command, "commands", {}).values():
        restore_argument_help(subcommand)
    declared = get_params_from_function(command.callback) if command.callback is not None else {}
    for param in command.params:
        if param.param_type_name == "argument" and param.help is None:
            param.help = declared[param.name].default.help


def let_ray_stand_alone(command: Any) -> None:
    """Let --ray be given without an address, of a command and its subcommands; Typer has no such options."""
    for subcommand in getattr(command, "commands", {}).values():
        let_ray_stand_alone(subcommand)
    for param in command.params:
        if "--ray" in param.opts:
            param.flag_value, param._flag_needs_value = "local", True


def launcher(ray: str | None, interval: float | None, devices: str | None, device: str | None) -> Any:
    """What runs the sweep, or None, from the options of a command."""
    if ray is None and interval is None and devices is None:
        return None
    if ray is not None and ray.endswith(".toml"):
        raise ConfigError(f"--ray {ray}: this is no address; write --ray at the end of the command")
    if devices is not None and device is not None:
        raise ConfigError("--devices and --device: leave one of them out")
    from holdfast.sweeps.launchers import launcher_of

    return launcher_of(True if ray == "local" else ray, devices, interval)


def check_explain(explain: bool, as_json: bool) -> None:
    if explain and as_json:
        raise ConfigError(
            "--explain explains the table in the terminal; leave it out, or --json and --markdown"
        )


def print_explanations(console: Console, explanations: Iterable[tuple[str, str]]) -> None:
    """Print one line for each column."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, text in explanations:
        table.add_row(plain_text(title), plain_text(text))
    console.print()
    console.print(table)


def command_line(*words: object) -> str:
    """A command that can be pasted into a shell."""
    return shlex.join(["holdfast", *map(str, words)])


def open_page(page: Path) -> None:
    import webbrowser

    webbrowser.open(page.resolve().as_uri())

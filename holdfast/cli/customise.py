"""`holdfast customise` makes a model for a client that joins after training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import AsJson, Plugins, app, load_plugins, only_json, print_json, to_stderr
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.results.late_join import JoinResult
    from holdfast.results.run import Run


@app.command()
def customise(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a finished fedcap run.", show_default=False)
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="Data of the new client: a folder of Parquet files, or a config (TOML).",
        ),
    ] = None,
    client: Annotated[
        int | None,
        typer.Option(
            "--client",
            metavar="ID",
            help="Number of a client of the run, for example a held-out one; with a config in --data, of that"
            " config.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write; default: customised-NAME.safetensors in RUN."),
    ] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Make a model for a client that joins after training (fedcap only).

    The new client trains an update on its data, as the clients of the run do. The server's answer is mixed
    from the models that the run saved, and is written as a safetensors file. A folder is read by the data
    source of the run; of a config, only the section \\[data] and the seed are used. The run itself does not
    change.

    \b
    Examples:
      holdfast customise runs/mine --client 17
      holdfast customise runs/mine --data ~/photographs --out my-model.safetensors


    """
    if data is None and client is None:
        raise ConfigError("give the data of the new client with --data, or a client of the run with --client")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.parent}")
    if out is not None and out.is_dir():
        raise ConfigError(
            f"--out: {out} is a folder; name a file in it, for example {out / 'mine.safetensors'}"
        )
    with (
        only_json(as_json),
        _stages("reading the run", "training the update", "writing the model") as next_stage,
    ):
        from holdfast.results.run import Run

        load_plugins(plugin)
        run = Run(folder)
        run.pooled()  # refuse a method without pools before any data is read
        next_stage()
        joined = _joined(run, data, client)
        next_stage()
        name = "-".join(str(part) for part in (data.stem if data else None, client) if part is not None)
        file = out or folder / f"customised-{name}.safetensors"
        _write(run, joined, file)
    if as_json:
        return print_json(
            {
                "model": str(file),
                "samples": joined.samples,
                "tested": joined.tested,
                "accuracy": joined.accuracy,
                "accuracy/global": joined.of_global,
            }
        )
    print(file)
    if joined.accuracy is not None:
        print(
            f"accuracy {joined.accuracy:.3f} on its own {joined.tested} test samples; the global model has"
            f" {joined.of_global:.3f}"
        )


def _joined(run: Run, data: Path | None, client: int | None) -> JoinResult:
    from holdfast.core.files import expand
    from holdfast.results.late_join import from_config, from_folder, join, join_again

    if data is None:
        assert client is not None
        return join_again(run, client)
    path = expand(data, "--data")
    if path.is_dir():
        if client is not None:
            raise ConfigError(
                "--client: a folder in --data belongs to one client; leave out --client, or give a config in"
                " --data"
            )
        return join(run, from_folder(run, path))
    return join(run, from_config(run, path, client))


def _write(run: Run, joined: JoinResult, file: Path) -> None:
    from safetensors.torch import save

    from holdfast.core.files import write_atomically

    tensors = run._experiment.network.layout.tensors(joined.model)
    write_atomically(file, save({name: value.contiguous() for name, value in tensors.items()}))


@contextmanager
def _stages(*titles: str) -> Iterator:
    """Show a progress bar with the name of each stage, on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = to_stderr()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task, left = bar.add_task(titles[0], total=len(titles)), list(titles[1:])

        def next_stage() -> None:
            bar.update(task, advance=1, description=left.pop(0))

        yield next_stage

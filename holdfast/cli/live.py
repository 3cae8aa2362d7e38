"""`holdfast report --live`: follow a job in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.app import to_stderr
from holdfast.core.errors import ConfigError

Live = Annotated[
    bool,
    typer.Option("--live", help="Follow a running job in the browser, on this machine only, until Ctrl-C."),
]
Port = Annotated[
    int | None,
    typer.Option("--port", metavar="N", min=0, max=65535, help="With --live: the port; default: a free one."),
]


def follow(folder: Path, port: int | None, opened: bool) -> None:
    """Serve until Ctrl-C."""
    import webbrowser

    from holdfast.report.live import Server

    console = to_stderr()
    server = Server(
        folder,
        port or 0,
        lambda words: console.print(f"{words}; the page stays until Ctrl-C", markup=False, style="dim"),
    )
    with server:
        print(server.url, flush=True)
        console.print(
            f"{folder}: {server.viewed.state().words}; only for this machine, ends with Ctrl-C",
            markup=False,
            style="dim",
        )
        if opened:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("stopped; the job itself is left alone", markup=False, style="dim")


def check(live: bool, port: int | None, out: Path | None, markdown: bool) -> None:
    if port is not None and not live:
        raise ConfigError("--port: only with --live")
    if live and (out is not None or markdown):
        raise ConfigError("--live: shows a page and writes none; leave out --out and --markdown")

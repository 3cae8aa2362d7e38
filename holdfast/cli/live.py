"""`holdfast report --live` follows a job in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.app import to_stderr
from holdfast.core.errors import ConfigError

Live = Annotated[
    bool,
    typer.Option("--live", help="Follow a running job in the browser, from this machine only, until Ctrl-C."),
]
Port = Annotated[
    int | None,
    typer.Option("--port", metavar="N", min=0, max=65535, help="Port for --live; default: a free one."),
]


def follow(folder: Path, port: int | None, opened: bool) -> None:
    """Serve the page until Ctrl-C."""
    import webbrowser

    from holdfast.report.live import Server

    console = to_stderr()
    server = Server(
        folder,
        port or 0,
        lambda words: console.print(f"{words}; press Ctrl-C to close the page", markup=False, style="dim"),
    )
    with server:
        print(server.url, flush=True)
        console.print(
            f"{folder}: {server.viewed.state().words}; visible on this machine only; press Ctrl-C to close",
            markup=False,
            style="dim",
        )
        if opened:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("page closed; jobs that are running continue", markup=False, style="dim")


def check(live: bool, port: int | None, out: Path | None, markdown: bool) -> None:
    if port is not None and not live:
        raise ConfigError("--port works only with --live")
    if live and (out is not None or markdown):
        raise ConfigError("--live writes no file; leave out --out and --markdown")

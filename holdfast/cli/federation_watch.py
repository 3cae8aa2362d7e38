"""`holdfast federation watch`: the live page of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import print_line, to_stderr
from holdfast.cli.federation import Folder, federation, opened

if TYPE_CHECKING:
    from holdfast.deploy.project import Project
    from holdfast.report.page_server import PublicAddress

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@federation.command()
def watch(
    folder: Folder,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the page; 0: a free one.")
    ] = 0,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="ADDRESS",
            help="Address to listen on. Any other than 127.0.0.1 means TLS and a password.",
        ),
    ] = "127.0.0.1",
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show a live page until Ctrl-C: nodes, rounds, refusals and bans with reasons, bytes, time left. It also
    works after the end.

    \b
    Examples:
      holdfast federation watch ward --open
      holdfast federation watch ward --listen 0.0.0.0 --port 8444




    """
    import webbrowser

    project = opened(folder)
    from holdfast.report.page_server import PageServer
    from holdfast.report.watch import WatchPages

    console = to_stderr()
    public = None if listen in _LOOPBACK else _public_address(project, listen)
    with PageServer(WatchPages(project), port, lambda words: print_line(console, words), public) as server:
        print(server.url, flush=True)
        if public is None:
            print_line(console, "visible on this machine only; press Ctrl-C to close")
        else:
            print_line(
                console,
                f"user watch, password in {_secret(project)}; the authority of the certificate is"
                f" {project.server / 'ca.pem'}; press Ctrl-C to close",
            )
        if open_page:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print_line(console, "page closed; the federation is not touched")


def _secret(project: Project) -> Path:
    return project.server / "watch.secret"


def _public_address(project: Project, listen: str) -> PublicAddress:
    """Return the server's own certificate, and a password that is made once."""
    import ssl

    from holdfast.core.reading import read_whole
    from holdfast.deploy.keys import hosts_of, make_secret, ready_certificates
    from holdfast.report.page_server import PublicAddress

    ready_certificates(project.server, [project.settings.host])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(project.server / "server.pem", project.server / "server.key")
    if not _secret(project).exists():
        make_secret(_secret(project))
    names = [project.settings.host, *hosts_of(project.server / "server.pem")]
    password = read_whole(_secret(project), 1 << 12).decode().strip()
    return PublicAddress(listen, list(dict.fromkeys(names)), context, password)

"""`holdfast federation rotate`, `head`, `backup`, `restore` and `accept-loss`: the server's key, its signed
ledger head, its backups, and what a node's owner does about a server that lost rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.app import AsJson, print_json, print_line, to_stderr, to_stdout
from holdfast.cli.federation import Folder, federation, need_flower, opened
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import write_atomically

Reason = Annotated[str, typer.Option("--reason", help="Written into the ledger.", show_default=False)]


@federation.command()
def rotate(folder: Folder, reason: Reason = "by the operator") -> None:
    """Replace the server's key for orders and its TLS key. The federation must be stopped; nodes follow by
    themselves, because the old key signs the new one. A node's key: `key --new` or `enrol`.

    \b
    Example:
      holdfast federation rotate ward --reason "yearly"




    """
    project = opened(folder)
    from holdfast.deploy.keys import renew_server_certificate
    from holdfast.deploy.processes import Processes
    from holdfast.deploy.server_keys import replace_server_key

    if Processes(project.server / "flower", project.logs).alive():
        raise ConfigError(f"{folder} is running; stop it first, its nodes may go on")
    ledger = project.ready_ledger()
    replace_server_key(ledger, reason)
    renew_server_certificate(project.server)
    project.share_server_key()
    print_line(to_stdout(), f"the server has new keys; ledger head {ledger.head}")
    print_line(
        to_stderr(),
        "nodes on other machines keep the new key (server.pub) at its first order; nothing has to be copied",
    )


@federation.command()
def head(
    folder: Folder,
    publish: Annotated[
        Path | None,
        typer.Option("--publish", metavar="FILE", help="Write it to a file for others.", show_default=False),
    ] = None,
) -> None:
    """Print the ledger head as the server has signed it, or write it to a file. `verify --head` and
    `check-head` check such a file.

    \b
    Examples:
      holdfast federation head ward
      holdfast federation head ward --publish ward.head




    """
    project = opened(folder)
    from holdfast.core.reading import read_whole
    from holdfast.deploy.signed_head import SIGNED_HEAD

    ledger = project.ready_ledger()  # signs what is not signed yet
    content = read_whole(project.server / SIGNED_HEAD, 1 << 16)
    if publish is None:
        print(content.decode().rstrip())
        return
    write_atomically(publish, content)
    print_line(to_stdout(), f"{publish}: {len(ledger.entries)} entries, head {ledger.head}")


@federation.command("check-head")
def check_head(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A signed ledger head.", show_default=False)],
    node: Annotated[Path, typer.Argument(metavar="NODE", help="The node's own folder.", show_default=False)],
    as_json: AsJson = False,
) -> int:
    """Check a published ledger head on a node: the server's signature, and that it is no other ledger than
    the one that this node was shown.

    \b
    Example:
      holdfast federation check-head ward.head nodes/3




    """
    need_flower()
    from holdfast.cli.federation_inspect import show_checks
    from holdfast.deploy.node_check import examine_head

    return show_checks(list(examine_head(file, node)), as_json)


@federation.command()
def backup(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .tar.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Back up the server: settings, keys, ledger, run. It may be running. The file has private keys. Nodes
    are backed up by their owners.

    \b
    Example:
      holdfast federation backup ward ward-monday.tar




    """
    project = opened(folder)
    from holdfast.deploy.backup import write_backup

    written = write_backup(project, out)
    if as_json:
        print_json({name: value for name, value in vars(written).items() if name != "files"})
        return
    print_line(
        to_stdout(),
        f"{out}: round {written.round}, {written.entries} entries, head {written.head}; it has private keys",
    )


@federation.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A backup.", show_default=False)],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder without a server.", show_default=False)
    ],
    head: Annotated[
        list[Path] | None,
        typer.Option(
            "--head", metavar="FILE", help="A ledger head that a node or others have kept; repeatable."
        ),
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            "--accept-loss",
            metavar="REASON",
            help="Continue although nodes have seen more; written into the ledger.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Restore a backup, and check that it is not older than its nodes: those whose folders are in DIR/nodes,
    and ledger heads given with --head.

    \b
    Examples:
      holdfast federation restore ward-monday.tar ward
      holdfast federation restore ward-monday.tar ward --head nodes/3/state/ledger.head




    """
    need_flower()
    from holdfast.deploy.backup import accept_older_server, newer_nodes, remove_restored, restore_backup

    project, found = restore_backup(file, folder)
    newer = newer_nodes(project, head or [])
    if newer and accept is None:
        remove_restored(project, found)
        who = "; ".join(f"{name} has seen {seen.entries} entries" for name, seen in newer.items())
        raise RunError(
            f"{file} is older than its nodes: it ends with round {found.round} and {found.entries} entries,"
            f" {who}. Restore a newer backup, or accept the loss: `--accept-loss REASON`"
        )
    out = to_stdout()
    print_line(out, f"restored round {found.round}, {found.entries} entries, of {found.at}")
    if newer and accept is not None:
        print_line(out, f"the loss is in the ledger; head {accept_older_server(project, newer, accept)}")
        print_line(
            to_stderr(),
            "nodes that have seen more refuse this server until their owners run `holdfast federation"
            " accept-loss NODE --reason TEXT`",
        )
    print_line(out, f"next      holdfast federation doctor {folder}")


@federation.command("accept-loss")
def accept_loss(
    nodes: Annotated[
        list[Path],
        typer.Argument(metavar="NODE...", help="Folders of nodes on this machine.", show_default=False),
    ],
    reason: Annotated[str, typer.Option("--reason", help="Kept on the node.", show_default=False)],
) -> None:
    """Accept on a node that its server lost rounds, so that the node works for it again. What the node had
    kept stays as evidence. Private state of the lost rounds is discarded.

    \b
    Example:
      holdfast federation accept-loss nodes/3 --reason "the server's disk failed"




    """
    need_flower()
    from holdfast.deploy.project import open_node
    from holdfast.deploy.server_memory import ServerMemory

    for node in nodes:
        settings = open_node(node)
        told = ServerMemory(node / settings.state).accept(reason)
        print_line(to_stdout(), f"client {settings.client} accepts its server as it is; it had seen {told}")

"""`holdfast federation ban`, `unban`, `key`, `enrol` and `leave`: what an operator decides about a client,
and a node's own key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.app import print_line, to_stderr, to_stdout
from holdfast.cli.federation import Folder, federation, need_flower, opened
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.deploy.project import Project

Client = Annotated[int, typer.Argument(metavar="CLIENT", help="Number of the client.", show_default=False)]
Reason = Annotated[str, typer.Option("--reason", help="Written into the ledger.", show_default=False)]


@federation.command()
def ban(folder: Folder, client: Client, reason: Reason = "by the operator") -> None:
    """Ban a client permanently: it is sent nothing from now on, and its key is rejected.

    \b
    Example:
      holdfast federation ban ward 3 --reason "its disk was stolen"




    """
    _decide(opened(folder), client, "ban", reason)


@federation.command()
def unban(folder: Folder, client: Client, reason: Reason = "by the operator") -> None:
    """Remove the ban of a client: it is asked again from the next exchange on, with the key that it has.

    \b
    Example:
      holdfast federation unban ward 3 --reason "it was our mistake"




    """
    _decide(opened(folder), client, "unban", reason)


def _decide(project: Project, client: int, kind: str, reason: str) -> None:
    from holdfast.deploy.enrolment import Enrolment

    ledger = project.ready_ledger()
    who = Enrolment.of(ledger.entries)
    if client not in who.members:
        raise ConfigError(
            f"there is no client {client}; there are {', '.join(map(str, sorted(who.members)))}"
        )
    if (kind == "ban") == (client in who.banned):
        raise ConfigError(
            f"client {client} is {'banned already: ' + who.banned[client] if kind == 'ban' else 'not banned'}"
        )
    ledger.append(kind, client, reason=reason, by="operator")
    ledger.sign()
    from holdfast.deploy.registered import gone_for_good

    done = "banned" if kind == "ban" else "no longer banned"
    if kind == "unban" and gone_for_good(project.server, who.members[client].fingerprint):
        # Earlier versions removed a banned key from the SuperLink, which takes no key twice.
        done += f"; give it a new key: `holdfast federation enrol {project.path} {client}`"
    print_line(to_stdout(), f"client {client} is {done}; ledger head {ledger.head}")


@federation.command()
def key(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="The node's own folder; created if missing.", show_default=False
        ),
    ],
    client: Annotated[
        int,
        typer.Option("--client", min=0, help="Number of the client that this node is.", show_default=False),
    ],
    new: Annotated[
        bool,
        typer.Option("--new", help="Make a second key, which the node takes once it is enrolled."),
    ] = False,
) -> None:
    """Make the key of a node on the node itself, and print the public half for the server. With --new,
    replace the key of a node that may be running.

    \b
    Examples:
      holdfast federation key nodes/3 --client 3
      holdfast federation key nodes/3 --client 3 --new





    """
    need_flower()
    from holdfast.deploy.keys import make_node_key, write_node_public

    if new:
        _renew(folder, client)
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = (
        write_node_public
        if (folder / "key").exists() and not (folder / "key.pub").exists()
        else make_node_key
    )
    public, out, err = made(folder, f"client-{client}"), to_stdout(), to_stderr()
    print_line(out, public)
    print_line(err, f"the private key is {folder / 'key'}: it stays here")
    print_line(
        err,
        f"give {folder / 'key.pub'} to the server's operator: `holdfast federation enrol DIR {client} --key"
        " FILE.pub`",
    )
    print_line(
        err,
        f"then bring the server's folder nodes/{client} into {folder}; `holdfast federation check-node"
        f" {folder}` checks it",
    )


def _renew(folder: Path, client: int) -> None:
    from holdfast.deploy.pending_key import make_pending_key

    print_line(to_stdout(), make_pending_key(folder, client))
    print_line(
        to_stderr(),
        f"give {folder / 'key.new.pub'} to the server's operator: `holdfast federation enrol DIR {client}"
        " --key FILE.pub`; the node uses its old key until then, and takes the new one by itself",
    )


@federation.command()
def enrol(
    folder: Folder,
    client: Client,
    public: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE.pub",
            help="The public key that the node has made; default: a new key is made here.",
        ),
    ] = None,
) -> None:
    """Enrol a client, or give it a new key; its old key is rejected from then on.

    \b
    Examples:
      holdfast federation enrol ward 3
      holdfast federation enrol ward 3 --key node3.pub




    """
    project = opened(folder)
    from holdfast.deploy.enrolment import Enrolment
    from holdfast.deploy.node import expected, federated
    from holdfast.deploy.project import enrol as write

    clients = expected(federated(project.experiment))
    write(project, client, None if public is None else _read_key(public))
    where = project.node(client)
    made = f"has a key in {where}; bring that folder to its machine"
    taken = f"is enrolled with its own key; bring {where} to its machine, into the folder that has the key"
    print_line(to_stdout(), f"client {client} {made if public is None else taken}")
    banned = Enrolment.of(project.ledger().entries).banned
    if client in banned:
        print_line(
            to_stderr(), f"it is banned ({banned[client]}) and stays so until `holdfast federation unban`"
        )
    if client >= clients:
        said = (
            f"the experiment has clients 0 to {clients - 1}: this one is not asked unless data.clients is"
            " raised for a new run"
        )
        print_line(to_stderr(), said)


def _read_key(file: Path) -> str:
    from holdfast.core.reading import read_whole

    try:
        text = read_whole(file, 1 << 16, pipe=True).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--key: {file} cannot be read: {error}") from None
    if "PRIVATE KEY" in text:
        raise ConfigError(
            f"--key: {file} is a private key, which never leaves its node; give its public half, {file}.pub"
        )
    return text


@federation.command()
def leave(folder: Folder, client: Client) -> None:
    """Remove a client from the run: it is not asked any more; `enrol` brings it back.

    \b
    Example:
      holdfast federation leave ward 3




    """
    project = opened(folder)
    from holdfast.deploy.enrolment import Enrolment

    ledger = project.ready_ledger()
    who = Enrolment.of(ledger.entries)
    if client in who.banned:
        raise ConfigError(f"client {client} is banned ({who.banned[client]}) and is not asked anyway")
    if client not in who.admitted:
        raise ConfigError(f"client {client} is not in the federation")
    ledger.append("leave", client)
    ledger.sign()
    print_line(to_stdout(), f"client {client} has left; ledger head {ledger.head}")

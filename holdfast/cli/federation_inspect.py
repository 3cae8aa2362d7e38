"""`holdfast federation status`, `clients`, `logs`, `doctor`, `verify`, `accept-ledger`, `export`,
`check-node` and `privacy`: what an operator or the owner of a node asks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.app import AsJson, plain_text, print_json, print_line, to_stdout
from holdfast.cli.federation import Folder, federation, need_flower, opened
from holdfast.core.errors import ConfigError, in_print, suggest

if TYPE_CHECKING:
    from holdfast.deploy.check import Check


@federation.command("check-node")
def check_node(
    folder: Annotated[Path, typer.Argument(metavar="NODE", help="The node's own folder.")],
    as_json: AsJson = False,
) -> int:
    """Check a node before round 1: key, experiment, its data against the schema and class names, privacy.

    \b
    Example:
      holdfast federation check-node nodes/3





    """
    need_flower()
    from holdfast.deploy.node_check import examine_node

    return show_checks(list(examine_node(folder)), as_json)


@federation.command()
def privacy(
    folder: Annotated[Path, typer.Argument(metavar="NODE", help="The node's own folder.")],
    as_json: AsJson = False,
) -> None:
    """Print the privacy budget that this node has spent: epsilon at client level, over all replies of all
    runs.

    \b
    Examples:
      holdfast federation privacy nodes/3
      holdfast federation privacy nodes/3 --json




    """
    need_flower()
    from holdfast.deploy.privacy import Account
    from holdfast.deploy.project import open_node
    from holdfast.experiment.config import make_config
    from holdfast.experiment.config_tables import read_config

    settings = open_node(folder)
    asked = settings.privacy or make_config(read_config(folder / settings.experiment)).privacy
    if asked is None:
        raise ConfigError(
            f"{folder}: neither node.toml nor the experiment has [privacy]: what leaves this node is neither"
            " clipped nor noised"
        )
    spent = Account(folder / settings.state).spent(asked.delta)
    if as_json:
        print_json({name: value if math.isfinite(value) else None for name, value in spent.items()})
    else:
        print(f"{spent['epsilon/client']:.6g}")


@federation.command()
def status(folder: Folder, as_json: AsJson = False) -> None:
    """Show the state of the federation: round, accuracy, bans, and the ledger head.

    \b
    Example:
      holdfast federation status ward




    """
    project = opened(folder)
    from holdfast.deploy.inspect import federation_status

    found = federation_status(project)
    if as_json:
        print_json(found)
        return
    console = to_stdout()
    state = "finished" if found["finished"] else "up" if found["up"] else "stopped"
    accuracy = "" if found["accuracy"] is None else f", accuracy {found['accuracy']:.3f}"
    paused = "".join(
        f"; client {client} does not answer and is paused until round {until}"
        for client, until in found["paused"].items()
    )
    for name, text in {
        "state": f"{state} ({found['processes']} processes)",
        "round": f"{found['round']}{accuracy}",
        "nodes join at": found["address"],
        "clients": f"{found['clients']}, {len(found['banned'])} banned{paused}",
        "ledger": f"{found['entries']} entries, head {found['head']}",
        "run": found["run"],
    }.items():
        print_line(console, f"{name:<15} {text}")


@federation.command()
def clients(folder: Folder, as_json: AsJson = False) -> None:
    """List the clients: last round, weight, score, strikes, bans and their reasons.

    \b
    Example:
      holdfast federation clients ward




    """
    from rich.table import Table

    project = opened(folder)
    from holdfast.deploy.inspect import clients as list_clients

    rows = list_clients(project)
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0] if rows else []:
        table.add_column(
            name, justify="left" if name in ("state", "key", "why") else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*(plain_text(_text(value)) for value in row.values()))
    to_stdout().print(table)


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@federation.command()
def logs(
    folder: Folder,
    name: Annotated[
        str | None, typer.Argument(help="superlink, superexec, proxy, node3, run-...", show_default=False)
    ] = None,
    lines: Annotated[int, typer.Option("--lines", min=1, help="Number of lines.")] = 40,
) -> None:
    """Print the last lines of a process's log; without a name, list the logs.

    \b
    Examples:
      holdfast federation logs ward
      holdfast federation logs ward node3 --lines 100




    """
    project = opened(folder)
    from holdfast.core.reading import last_lines
    from holdfast.deploy.inspect import logs as files

    found = files(project)
    if name is None:
        for known, file in found.items():
            print(f"{in_print(known):<24} {file.stat().st_size:>10,} bytes")
        return
    if name not in found:
        raise ConfigError(f"there is no log '{name}'{suggest(name, found)}")
    print("\n".join(in_print(line) for line in last_lines(found[name], lines)))


@federation.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Ends in .safetensors.", show_default=False)],
    client: Annotated[
        int | None,
        typer.Option(
            "--client", help="Client whose model to write; default: the global one.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="global, customised or personal.", show_default=False)
    ] = None,
    node_folder: Annotated[
        Path | None, typer.Option("--node", help="The node's folder; personal models are only there.")
    ] = None,
) -> None:
    """Write a model as safetensors: the global one, or a client's. A personal model never leaves its node:
    export it there with --node.

    \b
    Examples:
      holdfast federation export ward model.safetensors
      holdfast federation export ward mine.safetensors --client 3 --model customised
      holdfast federation export ward mine.safetensors --node nodes/3





    """
    need_flower()
    from holdfast.deploy.export import export_model

    written = export_model(opened(folder) if node_folder is None else None, out, client, model, node_folder)
    print_line(to_stdout(), written)


@federation.command()
def verify(
    folder: Folder,
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="HEX|FILE",
            help="Ledger head saved earlier on another machine.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check the ledger against its own chain, the run, the SHA-256 of the model and ledger heads.

    HEX is a ledger head as `status` prints it, FILE a signed one, such as the ledger.head that each
    node keeps.

    \b
    Examples:
      holdfast federation verify ward
      holdfast federation verify ward --head nodes/3/state/ledger.head





    """
    project = opened(folder)
    from holdfast.deploy.inspect import examined

    return show_checks(list(examined(project).examine(head)), as_json)


@federation.command("accept-ledger")
def accept_ledger(
    folder: Folder,
    reason: Annotated[
        str, typer.Option("--reason", help="Written into the ledger, permanently.", show_default=False)
    ],
) -> None:
    """Continue with a ledger that `verify` refuses, when its newest copy is lost. The loss and the reason
    become an entry of it.

    \b
    Example:
      holdfast federation accept-ledger ward --reason "the disk failed; this is the backup of Monday"





    """
    project = opened(folder)
    from holdfast.deploy.enrolment import Enrolment
    from holdfast.deploy.ledger_keeping import accept_ledger as accept
    from holdfast.deploy.processes import Processes

    if Processes(project.server / "flower", project.logs).alive():
        raise ConfigError(f"{folder} is running; stop it first")
    ledger = accept(project.ledger_file, project.run, reason)
    project.share_server_key()
    who = Enrolment.of(ledger.entries)
    here = (
        f"{len(who.members)} clients are enrolled, {len(who.banned)} of them banned; enrol and ban"
        " missing ones again"
    )
    print_line(to_stdout(), f"accepted; {here}; ledger head {ledger.head}")


@federation.command()
def doctor(folder: Folder, as_json: AsJson = False) -> int:
    """Check the federation before round 1: versions, clock, ports, certificates, keys, config, ledger.

    \b
    Example:
      holdfast federation doctor ward





    """
    project = opened(folder)
    from holdfast.deploy.inspect import examine

    return show_checks(list(examine(project)), as_json)


def show_checks(checks: list[Check], as_json: bool) -> int:
    """Print checks and return the exit code."""
    if as_json:
        print_json([{"what": c.what, "good": c.good, "said": c.said} for c in checks])
    else:
        for check in checks:
            print_line(to_stdout(), f"{'ok ' if check.good else 'BAD'}  {check.what:<12} {check.said}")
    return 0 if all(check.good for check in checks) else 1

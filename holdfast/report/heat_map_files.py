"""How many samples of each class every client holds, as a figure."""

from __future__ import annotations

from pathlib import Path

from holdfast.report import plots
from holdfast.report.class_counts import Holdings, what
from holdfast.report.drawing import Drawing, write_drawings

_MOST_CLIENTS = 2_000


def write_heat_map(holdings: Holdings, path: Path) -> None:
    """Write the figure with its title; the ending of the file says the format."""
    write_drawings([holdings_drawing(holdings, titled=True)], path)


def holdings_drawing(holdings: Holdings, titled: bool = False) -> Drawing:
    """Clients across, classes down, darker for more samples."""
    counts = holdings.counts[:_MOST_CLIENTS].tolist()
    most, hidden = max(int(holdings.counts.max()), 1), len(holdings.counts) - _MOST_CLIENTS
    more = f"; {hidden:,} more clients are not drawn" if hidden > 0 else ""
    partition = (
        f"{holdings.federation.clients:,} clients, partition {dict(holdings.described())['partition']}{more}"
    )
    return plots.heat_map(
        counts,
        holdings.clients[: len(counts)],
        holdings.names,
        ("client", "class"),
        [list(map(str, row)) for row in counts],
        most,
        f"{what(holdings.part)} of every client by class",
        holdings.title if titled else "",
        partition if titled else "",
        ("0", f"{most:,} {what(holdings.part)}"),
    )

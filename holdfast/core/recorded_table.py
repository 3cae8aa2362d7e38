"""How a part declares the tables that it records in every round, so that results and report need not know any
names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TableKind = Literal["clients", "flags", "pairs", "mixture", "votes", "classes", "members", "number", "ids"]


@dataclass(frozen=True)
class RecordedTable:
    """One table of a part: what it means and how it is drawn.

    A method declares its tables by their full names. A detector's tables are recorded under its name
    (`committee/votes`), and it declares them, and names them below, without it."""

    about: str
    title: str = ""
    """Short title of its picture; the table's name where it has none."""
    kind: TableKind = "clients"
    """clients: a number for each client; flags: 0 or 1 for each; pairs: a number for two clients; mixture:
    how much of whose model each client was given; votes: what each member of a committee scored each model;
    classes: a client's peer for each class; members: ids of clients; number: one for the round; ids: whose
    the rows or columns of other tables are, which is no table of its own."""
    rows: str = ""
    """The array with the ids of its rows; by default the clients on which the server had a verdict."""
    columns: str = ""
    """The array with the ids of its columns; by default they are numbered."""
    share: bool = False
    """Whether values are shares of one: they are shown in per cent."""
    note: str = ""
    """What a reader of its picture must know besides."""
    section: str = ""
    """The section of a run's page that shows it; by default that of all clients."""
    bound: str = ""
    """The table with the number that a value must reach."""
    given_by: str = ""
    """The table with the members of the committee that gave the values."""


COMMON = {
    "norms": RecordedTable(
        "length of each client's update, calibrated where the method calibrates", title="Length of the update"
    ),
    "weights": RecordedTable(
        "weight that the aggregation rule gave each client", title="Weight in the aggregate", share=True
    ),
    "epsilon": RecordedTable(
        "epsilon that each client has spent so far, under [privacy]",
        title="Privacy budget spent",
        rows="privacy/ids",
    ),
}
"""Tables that every method may have."""

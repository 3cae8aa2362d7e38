"""Flower's SuperLink, with more patience for its own database.

    python -m holdfast.deploy.superlink ...        the options of flower-superlink

A reply that finds the database locked for 5 seconds is lost, and its sender is a missing row once the server has stopped waiting: on two
busy cores that happened to one of sixteen nodes. A minute is as long as Flower waits for a sign of life."""

from __future__ import annotations

from flwr.supercore import constant

PATIENCE = 60_000
"""Milliseconds."""


def be_patient() -> None:
    """Before anything has read the setting; a Flower that keeps it elsewhere goes on as it is."""
    usual = getattr(constant, "SQLITE_PRAGMAS", ())
    patient = tuple((name, str(PATIENCE) if name == "busy_timeout" else value) for name, value in usual)
    vars(constant)["SQLITE_PRAGMAS"] = patient


def main() -> None:
    be_patient()
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


if __name__ == "__main__":
    main()

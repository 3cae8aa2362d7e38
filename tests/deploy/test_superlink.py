"""The SuperLink waits a minute for its database, not five seconds: a setting of Flower's own, which a new Flower may move."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

CODE = """
import sys
from holdfast.deploy.superlink import be_patient
be_patient()
from flwr.supercore.sql_mixin import _set_sqlite_pragmas
import sqlite3
connection = sqlite3.connect(":memory:")
_set_sqlite_pragmas(connection, None)
print(connection.execute("PRAGMA busy_timeout").fetchone()[0], connection.execute("PRAGMA foreign_keys").fetchone()[0])
"""


def test_its_database_is_waited_for() -> None:
    """In a process of its own: Flower reads the setting when it is imported."""
    done = subprocess.run([sys.executable, "-c", CODE], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout.split() == ["60000", "1"], done.stderr

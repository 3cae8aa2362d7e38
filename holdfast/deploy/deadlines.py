"""How long the server waits for each client. A client that announces an answer and never sends it would
otherwise cost the whole deadline in every exchange.

A client that has not missed a deadline has the whole of it. After a miss it has four times what it, or else
the slowest of the others, has needed for such a task. After three misses in a row it is paused: it is not
asked for a round, then for two, four and so on, each time with the whole deadline again, and its first answer
ends the pauses. Only time spent waiting counts as a miss: a client that is not connected, or answers with an
error, costs nothing. A client that answers at the last moment, or every second time, looks like a slow
machine: `deadline` bounds what it costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.deploy.ledger import Entry

_LEAST = 20.0  # seconds; a machine may be busy for a moment
_TIMES = 4.0  # the usual time of a task that a client has after a miss
_MISSES = 3  # in a row before a pause
_LONGEST = 64  # rounds of a pause


@dataclass
class Deadlines:
    """Deadlines and pauses of all clients. `most` is the configured deadline in seconds."""

    most: float
    needed: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """Seconds of the last answer, by task and client."""
    misses: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """In a row."""
    pauses: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Since its last answer."""
    until: dict[int, int] = field(default_factory=dict)
    """The first round in which a client that is paused is asked again."""

    def remember(self, entries: Iterable[Entry]) -> None:
        """Restore the pauses of an earlier start of the server from the ledger."""
        for entry in entries:
            if entry.kind == "start":  # another run
                for table in (self.misses, self.pauses, self.until):
                    table.clear()
            elif entry.kind == "pause" and entry.client is not None:
                self.until[entry.client] = int(entry.what["until"])
                self.pauses[entry.client] = int(entry.what["pauses"])
                self.misses[entry.client] = _MISSES
            elif entry.kind == "round":
                for client in entry.what.get("took_part", []):
                    self._forget(client)

    def of(self, client: int, task: str) -> float:
        """Return the seconds that this client has for this task."""
        if not 0 < self.misses[client] < _MISSES:  # after a pause an honest client may be slower
            return self.most
        times = self.needed[task]
        usual = times.get(client) or max(times.values(), default=self.most)
        return min(self.most, max(_LEAST, _TIMES * usual))

    def is_paused(self, client: int, round: int) -> bool:
        return round < self.until.get(client, 0)

    def answered(self, client: int, task: str, seconds: float) -> None:
        self.needed[task][client] = seconds
        self._forget(client)

    def missed(self, client: int, round: int) -> int | None:
        """Count one more miss. Return the round in which the client is asked again if it is paused now."""
        self.misses[client] += 1
        # A paused client may be asked again in the same round, for the quorum.
        if self.misses[client] < _MISSES or self.is_paused(client, round):
            return None
        self.pauses[client] += 1
        self.until[client] = round + 1 + min(_LONGEST, 2 ** (self.pauses[client] - 1))
        return self.until[client]

    def _forget(self, client: int) -> None:
        for table in (self.misses, self.pauses, self.until):
            table.pop(client, None)


def paused(entries: Sequence[Entry]) -> dict[int, int]:
    """Return the paused clients, each with the round in which it is asked again."""
    times = Deadlines(0.0)
    times.remember(entries)
    begun = max((entry.number for entry in entries if entry.kind == "start"), default=-1)
    done = max(
        (entry.round or 0 for entry in entries if entry.kind == "round" and entry.number > begun), default=0
    )
    return {client: until for client, until in times.until.items() if until > done + 1}

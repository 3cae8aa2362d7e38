"""How long each client is waited for. A client that announces an answer and never sends it would cost the
whole deadline in every exchange, for ever.

Whoever has not failed yet has the whole deadline. After a miss a client has a few times what it, or else the
slowest of the others, has needed for such a task. After several misses in a row it is paused: it is not asked
for a round, then for two, four and so on, each time with the whole deadline again, and its first answer ends
that. Only waiting counts as a miss: who is not connected, or answers with an error, costs nothing. Who
answers at the last moment, or every second time, cannot be told from a slow machine: `deadline` bounds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.deploy.ledger import Entry

_LEAST = 20.0  # seconds: a machine that is busy for a moment is no reason
_TIMES = 4.0
_MISSES = 3
_LONGEST = 64  # rounds of a pause


@dataclass
class Deadlines:
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
        """Pauses of an earlier start of the server, from the ledger."""
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
        """Seconds that this client has for this task."""
        if not 0 < self.misses[client] < _MISSES:  # after a pause it may have become slow, and honestly
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
        """One more miss; the round in which it is asked again, when it is paused for it."""
        self.misses[client] += 1
        if self.misses[client] < _MISSES or self.is_paused(
            client, round
        ):  # asked again in the same round, for the quorum
            return None
        self.pauses[client] += 1
        self.until[client] = round + 1 + min(_LONGEST, 2 ** (self.pauses[client] - 1))
        return self.until[client]

    def _forget(self, client: int) -> None:
        for table in (self.misses, self.pauses, self.until):
            table.pop(client, None)

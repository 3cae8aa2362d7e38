"""What the map keeps of a finished cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from benchmarks.defence_map.axes import F
from holdfast.attacks.adversary import Adversary
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.results.run import Run
from holdfast.storage.status import RunStatus


class Decisions(NamedTuple):
    """Of all rounds and clients: how many attackers there were and how many were left out, and the same of
    benign clients."""

    attackers: int = 0
    caught: int = 0
    benign: int = 0
    wronged: int = 0

    def rates(self) -> dict[str, float | None]:
        """In per cent. DAcc: decisions that were right. FPR: benign clients that were left out. FNR:
        attackers that were not."""
        right = self.caught + self.benign - self.wronged
        return {
            "dacc": _percent(right, self.attackers + self.benign) if self.attackers else None,
            "fpr": _percent(self.wronged, self.benign),
            "fnr": _percent(self.attackers - self.caught, self.attackers),
        }


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def decisions(rounds: Iterable[tuple[set[int], set[int]]], clients: int, malicious: set[int]) -> Decisions:
    """From each round's clients that were left out for that round, and those banned in it for good."""
    banned: set[int] = set()
    found = Decisions()
    for left_out, banned_now in rounds:
        banned |= banned_now
        out = left_out | banned
        found = Decisions(
            found.attackers + len(malicious),
            found.caught + len(out & malicious),
            found.benign + clients - len(malicious),
            found.wronged + len(out - malicious),
        )
    return found


def measured(status: RunStatus) -> dict[str, Any]:
    """The figures of one cell, in per cent and milliseconds; of one that failed, the reason."""
    if status.result is None:
        return {"note": f"failed in round {status.round}: {status.reason or status.status}"}
    final, run = status.result["final"], Run(status.path)
    found = {
        "accuracy": _of_share(final["accuracy"] if run.malicious() else of_spared(run)),
        "asr": _of_share(final.get("attack/asr")),
        **_left_out(run),
        "auc": final.get("detection/auc/weights"),
        "ms": _milliseconds(run),
        "fallback_rounds": final.get("fallback_rounds", 0),
    }
    if status.status == "diverged":
        found["note"] = f"diverged in round {status.round}"
    return found


def of_spared(run: Run) -> float:
    """Without an attack: the accuracy of the clients that are benign in the runs with one, so that the same
    clients are compared."""
    clients = run.clients()
    members = torch.tensor(clients["client"].tolist(), dtype=torch.int64)
    anyone = build("attack", {"name": "sign-flip", "fraction": F})
    drawn = Adversary(anyone, members, Key(run.manifest["config"]["seed"]).fold("attack")).malicious
    spared = clients[~clients["client"].isin(drawn.tolist()) & (clients["samples"] > 0)]
    return float(spared["accuracy/global"].mean())


def _of_share(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else 100 * value


def _left_out(run: Run) -> dict[str, float | None]:
    """A client is left out of a round where it is banned, rejected, refused by screening, or has no weight in
    the aggregate."""
    rounds = []
    for part in run.store.parts(run.round):
        arrays = run.store.arrays(part["round"])
        named = {int(client) for kind in ("rejected", "refused") for client in part.get(kind, {})}
        if (weights := arrays.get("verdict/weights")) is not None:
            named |= set(arrays["verdict/ids"][weights == 0].tolist())
        rounds.append((named, {int(client) for client in part.get("banned", {})}))
    clients = int(run.manifest["config"]["data"]["clients"] or 0) or len(run.clients())
    return decisions(rounds, clients, set(run.malicious())).rates()


def _milliseconds(run: Run) -> float | None:
    """The median over the rounds of the time of the server's part; the first is left out, because it also
    warms up."""
    spent = [part["seconds"]["server"] for part in run.store.parts(run.round)]
    return 1000 * statistics.median(spent[1:] or spent) if spent else None

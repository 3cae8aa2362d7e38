"""How well a rule or a detector finds attackers: its weights, scores and bans compared with the real
attackers, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Figures = dict[str, float | None]
_SCORES = "verdict/scores/"


@dataclass(frozen=True)
class JudgedRound:
    """One round: the clients that the server judged, which of them were malicious, and how suspicious it
    found them."""

    round: int
    ids: Tensor
    malicious: Tensor
    suspicion: Mapping[str, Tensor]
    """By name, a number per client: more is more suspicious."""
    banned: Mapping[int, bool]
    """Clients that this round banned, and whether each is malicious."""
    excluded: Mapping[int, bool]
    """Clients that this round banned or rejected, and whether each is malicious."""

    @staticmethod
    def of(part: Mapping[str, Any], arrays: Mapping[str, Tensor], malicious: Tensor) -> JudgedRound:
        ids, bad = arrays["verdict/ids"], set(malicious.tolist())
        suspicion = {
            name.removeprefix(_SCORES): value for name, value in arrays.items() if name.startswith(_SCORES)
        }
        if "verdict/weights" in arrays:  # a rule trusts those to whom it gives weight
            suspicion["weights"] = -arrays["verdict/weights"]
        banned, rejected = (
            {int(client): int(client) in bad for client in part.get(kind, {})}
            for kind in ("banned", "rejected")
        )
        return JudgedRound(
            part["round"], ids, torch.isin(ids, malicious), suspicion, banned, {**rejected, **banned}
        )


def of_rounds(rounds: Sequence[JudgedRound], decide: bool = False) -> Figures:
    """Areas under the ROC curve, each the mean over the rounds that have both kinds of client; and how soon
    the attackers that were caught were caught. With `decide`, also the rates of bans over all decisions."""
    out: Figures = {"detection/auc/weights": None}
    for name in dict.fromkeys(name for judged in rounds for name in judged.suspicion):
        areas = [
            auc(judged.suspicion[name], judged.malicious) for judged in rounds if name in judged.suspicion
        ]
        known = [area for area in areas if area is not None]
        out[f"detection/auc/{name}"] = sum(known) / len(known) if known else None
    caught = [judged.round for judged in rounds for rightly in judged.banned.values() if rightly]
    out["detection/rounds"] = sum(caught) / len(caught) if caught else None
    return out | (decisions(rounds) if decide else {})


def auc(suspicion: Tensor, malicious: Tensor) -> float | None:
    """The chance that an attacker looks more suspicious than a benign client; ties count half. None unless
    there are clients of both kinds; a client without a number (banned earlier) is left out."""
    there = ~torch.isnan(suspicion)
    bad, good = suspicion[there & malicious].double(), suspicion[there & ~malicious].double().sort().values
    if not len(bad) or not len(good):
        return None
    below, upto = torch.searchsorted(good, bad), torch.searchsorted(good, bad, right=True)
    return float((below + upto).double().mean()) / (2 * len(good))


def decisions(rounds: Sequence[JudgedRound]) -> Figures:
    """Rates where the attackers change: in every round, every client that the server judges is excluded or
    accepted."""
    bad = sum(int(judged.malicious.sum()) for judged in rounds)
    good = sum(len(judged.ids) for judged in rounds) - bad
    decided = [
        judged.excluded[client]
        for judged in rounds
        for client in judged.ids.tolist()
        if client in judged.excluded
    ]
    caught, wronged = sum(decided), len(decided) - sum(decided)
    return {
        "detection/dacc": (caught + good - wronged) / (bad + good) if bad else None,
        "detection/fpr": wronged / good if bad and good else None,
        "detection/fnr": (bad - caught) / bad if bad else None,
    }

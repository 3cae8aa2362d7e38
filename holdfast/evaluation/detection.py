"""How well a rule or a detector tells attackers from others: its weights, scores and bans against the truth,
round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Figures = dict[str, float | None]
_SCORES = "verdict/scores/"


@dataclass(frozen=True)
class Seen:
    """One round: the clients the server had a verdict on, which of them were malicious, and what it thought
    of them."""

    round: int
    ids: Tensor
    malicious: Tensor
    suspicion: Mapping[str, Tensor]
    """By name, a number per client: more is more suspicious."""
    banned: Mapping[int, bool]
    """Whom this round banned, and whether rightly."""
    turned_away: Mapping[int, bool]
    """Whom this round banned or rejected."""

    @staticmethod
    def of(part: Mapping[str, Any], arrays: Mapping[str, Tensor], malicious: Tensor) -> Seen:
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
        return Seen(part["round"], ids, torch.isin(ids, malicious), suspicion, banned, {**rejected, **banned})


def of_rounds(rounds: Sequence[Seen], decide: bool = False) -> Figures:
    """Areas under the ROC curve, each the mean over the rounds that have both kinds of client; and how soon
    the attackers that were caught were caught. With `decide`, also the rates of bans over all decisions."""
    out: Figures = {"detection/auc/weights": None}
    for name in dict.fromkeys(name for seen in rounds for name in seen.suspicion):
        areas = [auc(seen.suspicion[name], seen.malicious) for seen in rounds if name in seen.suspicion]
        known = [area for area in areas if area is not None]
        out[f"detection/auc/{name}"] = sum(known) / len(known) if known else None
    caught = [seen.round for seen in rounds for rightly in seen.banned.values() if rightly]
    out["detection/rounds"] = sum(caught) / len(caught) if caught else None
    return out | (decisions(rounds) if decide else {})


def auc(suspicion: Tensor, malicious: Tensor) -> float | None:
    """The chance that an attacker looks more suspicious than a benign client; ties count half. None where
    there are not both; a client without a number (banned before the question came up) is left out."""
    there = ~torch.isnan(suspicion)
    bad, good = suspicion[there & malicious].double(), suspicion[there & ~malicious].double().sort().values
    if not len(bad) or not len(good):
        return None
    below, upto = torch.searchsorted(good, bad), torch.searchsorted(good, bad, right=True)
    return float((below + upto).double().mean()) / (2 * len(good))


def decisions(rounds: Sequence[Seen]) -> Figures:
    """Rates where the attackers change: in every round, every client that the server has a verdict on is
    turned away or let pass."""
    bad = sum(int(seen.malicious.sum()) for seen in rounds)
    good = sum(len(seen.ids) for seen in rounds) - bad
    told = [
        seen.turned_away[client]
        for seen in rounds
        for client in seen.ids.tolist()
        if client in seen.turned_away
    ]
    caught, wronged = sum(told), len(told) - sum(told)
    return {
        "detection/dacc": (caught + good - wronged) / (bad + good) if bad else None,
        "detection/fpr": wronged / good if bad and good else None,
        "detection/fnr": (bad - caught) / bad if bad else None,
    }

"""What follows from a suspicion: a client is left out of the round, or banned once it was suspicious in
several rounds in a row. Detectors have the settings in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from holdfast.core.registry import Part, setting
from holdfast.core.types import State

NOT_FINITE = "model is not finite"


class Patient(Part):
    """The settings."""

    action: Literal["reject", "ban"] = setting(
        "reject", "leave suspicious clients out of this round, or ban them in the end as well"
    )
    patience: int = setting(3, "ban: after so many suspicious rounds of a client in a row", ge=1)

    def decided(
        self, state: State, ids: Tensor, reasons: Mapping[int, str], telling: bool = True
    ) -> tuple[State, dict[int, str], dict[int, str]]:
        """What to remember, whom to ban, and whom to reject. `reasons` are those of the suspicious rows; a
        round that tells nothing (`telling`) does not count for the others."""
        suspicious = torch.zeros(len(ids), dtype=torch.bool)
        suspicious[torch.tensor(list(reasons), dtype=torch.int64)] = True
        memory, streak = _counted(state, ids, suspicious, telling)
        banned, rejected = {}, {}
        for row, reason in sorted(reasons.items()):
            if self.action == "ban" and streak[row] >= self.patience:
                often = f", {streak[row]} rounds in a row" if self.patience > 1 else ""
                banned[int(ids[row])] = f"{reason}{often}"
            else:
                rejected[int(ids[row])] = reason
        return memory, banned, rejected


def in_a_row(state: State, ids: Tensor) -> Tensor:
    """How many rounds in a row these clients were suspicious so far."""
    known, streak = state.get("ids", ids[:0]), state.get("streak", ids[:0])
    everyone = torch.cat([known, ids]).unique()
    counts = torch.zeros_like(everyone).index_copy_(0, torch.searchsorted(everyone, known), streak)
    return counts[torch.searchsorted(everyone, ids)]


def _counted(state: State, ids: Tensor, suspicious: Tensor, telling: bool) -> tuple[State, Tensor]:
    """How many rounds in a row each client was suspicious, and those of this round's clients."""
    known, streak = state.get("ids", ids[:0]), in_a_row(state, ids)
    if telling or bool(suspicious.any()):
        streak = torch.where(suspicious, streak + 1, 0 if telling else streak)
    everyone = torch.cat([known, ids]).unique()
    counts = torch.zeros_like(everyone)
    counts[torch.searchsorted(everyone, known)] = state.get("streak", ids[:0])
    counts[torch.searchsorted(everyone, ids)] = streak
    return {"ids": everyone, "streak": counts}, streak

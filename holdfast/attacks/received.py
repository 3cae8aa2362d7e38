"""What attackers know from the models that they were sent, now and before, for attacks with a memory."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.attacks.base import View
from holdfast.attacks.several import Views
from holdfast.core.device import to_device


class Received:
    """The models and the memory of attackers in c experiments; a single view is a stack of one, so that an
    attack with a memory is written once. What is remembered of one request and field stays apart from that of
    others."""

    def __init__(self, view: View | Views, task: str, field: str, like: Tensor):
        """`like` [..., d] has the numbers and the device of what they send."""
        self._view, self._like, self._place = view, like, f"{task}/{field}/"
        sent = view.sent()
        if isinstance(view, View):
            sent, self._rounds = None if sent is None else sent[None], [view.round]
        else:
            self._rounds = view.rounds
        self.model = None if sent is None else sent[:, 0, : like.shape[-1]].to(like.dtype)
        """[c, d]: the parameters that the first attacker was sent, in the columns that this process has; None
        where no model was sent."""

    @property
    def rounds(self) -> Tensor:
        """[c, 1]: counted from 1."""
        return torch.tensor(self._rounds, dtype=torch.float64).clamp(min=1)[:, None]

    def recall(self, name: str) -> Tensor | None:
        """[c, ...]: what was remembered under this name, where the updates are; None where nothing was."""
        value = self._view.recall(self._place + name)
        if value is None:
            return None
        return to_device(value[None] if isinstance(self._view, View) else value, self._like.device)

    def remember(self, name: str, value: Tensor, columns: bool = False) -> None:
        """Remember [c, ...]. `columns`: its last axis is that of the updates."""
        single = isinstance(self._view, View)
        self._view.remember(self._place + name, (value[0] if single else value).clone(), columns)

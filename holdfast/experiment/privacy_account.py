"""What each client of a run has told so far under [privacy], what that costs, and who may still answer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from holdfast.core.generators import Steps
from holdfast.core.types import ROOT, Exchange
from holdfast.engine.client_task import schema_of
from holdfast.engine.run_context import RunContext
from holdfast.evaluation.metrics import Figures
from holdfast.privacy.accounting import epsilon_of, need_accountant
from holdfast.privacy.protection import Protection
from holdfast.privacy.settings import PrivacySettings


class PrivacyAccount:
    """The account of a run without [privacy]: nobody is withheld, nothing is counted or recorded."""

    @staticmethod
    def of(settings: PrivacySettings | None, run_context: RunContext) -> PrivacyAccount:
        return PrivacyAccount() if settings is None else ClientAccount(settings, run_context)

    def ask(self, exchange: Exchange) -> Steps:
        """Pass an exchange on to those clients that may still answer, and count what they told."""
        return (yield exchange)

    def figures(self) -> Figures:
        return {}

    def arrays(self) -> dict[str, Tensor]:
        """What a round records."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What is saved with a run."""
        return {}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from a saved state."""


class ClientAccount(PrivacyAccount):
    """Counts the replies of every client that noise protects. A malicious client protects nothing and is not
    counted. Raises a ConfigError where the method would send what noise does not protect."""

    def __init__(self, settings: PrivacySettings, run_context: RunContext):
        self.settings, self.run_context, self.protection = settings, run_context, Protection(settings)
        if settings.noise > 0:
            need_accountant()
        rule, wire = run_context.rule, run_context.wire()
        for task in sorted(rule.tasks):
            self.protection.check(rule.schema(task, wire), task, run_context.norm_cap)
        self.releases = torch.zeros(run_context.federation.clients, dtype=torch.int64)
        self.withheld: set[int] = set()

    def ask(self, exchange: Exchange) -> Steps:
        context = self.run_context
        schema = schema_of(context.rule, exchange, context.wire(), context.measure)
        if not self.protection.releases(schema):
            return (yield exchange)
        bound = self._bound(exchange.to)
        spent = torch.zeros_like(bound)
        spent[bound] = self._would_exceed(exchange.to[bound])
        self.withheld.update(exchange.to[spent].tolist())
        up = yield exchange.only(~spent)
        told = torch.tensor(sorted({*up.ids.tolist(), *up.refused}), dtype=torch.int64)
        self.releases = self.releases.clone()
        self.releases[told[self._bound(told)]] += 1
        return up

    def _bound(self, ids: Tensor) -> Tensor:
        """bool: which of these are honest clients, which keep to [privacy]."""
        context = self.run_context
        return (ids != ROOT) & ~torch.isin(ids, context.adversary.at(context.round))

    def _would_exceed(self, ids: Tensor) -> Tensor:
        """bool: whose next reply would bring them above the limit."""
        limit = self.settings.epsilon
        if limit is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        return torch.tensor([self._epsilon(n + 1) > limit for n in self.releases[ids].tolist()]).bool()

    def _epsilon(self, releases: int) -> float:
        counted = [(self.protection.multiplier, releases)] if releases else []
        return epsilon_of(counted, self.settings.delta)

    def epsilon(self) -> Tensor:
        """float64 [clients]: what each has spent; infinite without noise."""
        return torch.tensor([self._epsilon(n) for n in self.releases.tolist()], dtype=torch.float64)

    def figures(self) -> Figures:
        """The largest epsilon of a client, which holds for all of them (null: no noise, so no guarantee), and
        how many clients have stopped answering, since their budget is spent."""
        largest = float(self.epsilon().max()) if len(self.releases) else 0.0
        return {
            "privacy/epsilon": largest if math.isfinite(largest) else None,
            "privacy/delta": self.settings.delta,
            "privacy/withheld": len(self.withheld),
        }

    def arrays(self) -> dict[str, Tensor]:
        return {
            "privacy/ids": torch.arange(len(self.releases)),
            "privacy/releases": self.releases,
            "verdict/tables/epsilon": self.epsilon(),
        }

    def state(self) -> dict[str, Tensor]:
        withheld = torch.tensor(sorted(self.withheld), dtype=torch.int64)
        return {"privacy/releases": self.releases, "privacy/withheld": withheld}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        self.releases = saved["privacy/releases"]
        self.withheld = set(saved["privacy/withheld"].tolist())

"""What each client of a run has told so far under [privacy], what that costs, and who may still answer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from holdfast.core.errors import ConfigError
from holdfast.core.generators import Steps
from holdfast.core.types import ROOT, Exchange, Schema
from holdfast.engine.client_task import schema_of
from holdfast.engine.run_context import RunContext
from holdfast.evaluation.metrics import Figures
from holdfast.local.client import passes_of
from holdfast.methods.base import ClientRule
from holdfast.models.network import Network
from holdfast.privacy.accounting import epsilon_of, epsilon_of_samples, need_accountant
from holdfast.privacy.protection import Protection, refused
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
    """Counts what every client told that noise protects: replies or, at level `sample`, the passes over its
    data (or steps) of its training. A malicious client protects nothing and is not counted. Raises a
    ConfigError where the method would send what noise does not protect."""

    def __init__(self, settings: PrivacySettings, run_context: RunContext):
        self.settings, self.run_context, self.protection = settings, run_context, Protection(settings)
        if settings.noise > 0:
            need_accountant()
        rule, wire = run_context.rule, run_context.wire()
        if settings.of_samples:  # first: what it refuses, no other setting of [privacy] could permit
            check_dp_sgd(rule, run_context.network)
        schemas = {task: rule.schema(task, wire) for task in sorted(rule.tasks)}
        self._check_protects(schemas)
        for task, schema in schemas.items():
            self.protection.check(schema, task, run_context.norm_cap)
        self.releases = torch.zeros(run_context.federation.clients, dtype=torch.int64)
        self.next = self._planned()
        self.withheld: set[int] = set()

    def _check_protects(self, schemas: Mapping[str, Schema]) -> None:
        """Refuse a method that sends something, but no update: epsilon would be 0, for data sent bare."""
        if self.settings.of_samples or any(map(self.protection.releases, schemas.values())):
            return
        sends = any(refused(schema, task) for task, schema in schemas.items())
        if sends or self.settings.others == "send":
            raise ConfigError(
                f"privacy: method '{self.run_context.method.name}' sends no updates, so there is nothing to"
                " clip or noise, and what it sends would not be protected; leave [privacy] out, or choose"
                " another method"
            )

    def _planned(self) -> Tensor:
        """int64 [clients]: how much the next reply of each client is expected to count."""
        if not self.settings.of_samples:
            return torch.ones_like(self.releases)
        recipe, count = self.run_context.recipe, self.run_context.federation.train.counts
        per_pass = count // recipe.batch_size if recipe.drop_last else -(-count // recipe.batch_size)
        planned = per_pass * recipe.epochs if recipe.steps is None else per_pass.clamp(max=1) * recipe.steps
        steps = planned.repeat(self.run_context.rule.models_per_client)
        return passes_of(steps, count, recipe)[:, self._column].clamp(min=1)

    @property
    def _column(self) -> int:
        """Which of a training's numbers counts: its passes over the data, or its steps."""
        return int(self.settings.accounting == "poisson")

    def ask(self, exchange: Exchange) -> Steps:
        context = self.run_context
        schema = schema_of(context.rule, exchange, context.wire(), context.measure)
        if not self.protection.releases(schema):
            return (yield exchange)
        spent = self._bound(exchange.to) & self._would_exceed(exchange.to)
        self.withheld.update(exchange.to[spent].tolist())
        context.passes = None
        up = yield exchange.only(~spent)
        self._learn(context.passes)
        above = self._bound(up.ids) & self._would_exceed(up.ids)  # it trained more than was expected
        self.withheld.update(up.ids[above].tolist())
        up = up.only(~above)
        told = torch.tensor(sorted({*up.ids.tolist(), *up.refused}), dtype=torch.int64)
        told = told[self._bound(told)]
        self.releases = self.releases.clone()
        self.releases[told] += self.next[told]
        return up

    def _learn(self, trained: tuple[Tensor, Tensor] | None) -> None:
        """Note how much the clients trained; a federation's server does not learn it, and counts what was
        planned."""
        if trained is not None:
            ids, numbers = trained
            clients = ids != ROOT
            self.next = self.next.clone()
            self.next[ids[clients]] = numbers[clients, self._column]

    def _bound(self, ids: Tensor) -> Tensor:
        """bool: which of these are honest clients, which keep to [privacy]."""
        context = self.run_context
        return (ids != ROOT) & ~torch.isin(ids, context.adversary.at(context.round))

    def _would_exceed(self, ids: Tensor) -> Tensor:
        """bool: whose next reply would bring them above the limit."""
        limit = self.settings.epsilon
        if limit is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        after = (self.releases + self.next).tolist()
        return torch.tensor([c != ROOT and self._epsilon(c, after[c]) > limit for c in ids.tolist()]).bool()

    def _epsilon(self, client: int, releases: int) -> float:
        settings = self.settings
        if settings.accounting == "poisson":
            count = int(self.run_context.federation.train.counts[client])
            rate = min(1.0, self.run_context.recipe.batch_size / max(count, 1))
            return epsilon_of_samples(settings.noise, rate, releases, settings.delta)
        return epsilon_of([(self.protection.multiplier, releases)] if releases else [], settings.delta)

    def epsilon(self) -> Tensor:
        """float64 [clients]: what each has spent; infinite without noise."""
        spent = [self._epsilon(client, n) for client, n in enumerate(self.releases.tolist())]
        return torch.tensor(spent, dtype=torch.float64)

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
        return {"privacy/releases": self.releases, "privacy/next": self.next, "privacy/withheld": withheld}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        self.releases, self.next = saved["privacy/releases"], saved["privacy/next"]
        self.withheld = set(saved["privacy/withheld"].tolist())


def check_dp_sgd(rule: ClientRule, network: Network) -> None:
    """Refuse methods and models whose training DP-SGD does not protect."""
    if not vars(type(rule)).get("only_fit", False):
        raise ConfigError(
            f"privacy.level = \"sample\": method '{rule.method.name}' learns from its samples in other ways"
            ' than by the steps of local training, which DP-SGD does not protect; use level = "client"'
        )
    mixing = (*network.masked, *_batch_statistics(network))
    if mixing:
        raise ConfigError(
            f"privacy.level = \"sample\": layer '{mixing[0]}' mixes the samples of a batch, so their"
            " gradients cannot be clipped one by one; use a model without BatchNorm (GroupNorm is fine)"
        )


def _batch_statistics(network: Network) -> list[str]:
    """Layers that keep running statistics of what they see."""
    return [
        name
        for name, module in network.module.named_modules()
        if isinstance(module, _BatchNorm) or getattr(module, "track_running_stats", False)
    ]

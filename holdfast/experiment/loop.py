"""One experiment and the loop of its rounds. The loop is a generator of exchanges: the simulator and a Flower
server answer them, and drive the same lines."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks.adversary import Adversary
from holdfast.attacks.target import Target
from holdfast.core.columns import Ranks
from holdfast.core.device import to_device
from holdfast.core.flat import Wire
from holdfast.core.generators import Steps, relay
from holdfast.core.keys import Key
from holdfast.core.share import Share
from holdfast.core.together import Computation
from holdfast.core.types import ROOT, Exchange, State, Verdict
from holdfast.data.federation import Samples, build_federation
from holdfast.evaluation.probe import Probe
from holdfast.experiment.build import (
    check_global_test,
    make_network,
    make_run_context,
    measured_metrics,
    measured_models,
    with_named_model,
)
from holdfast.experiment.config import Config, Parts, check_cohort
from holdfast.experiment.meter import Meter
from holdfast.experiment.participation import Participation, read_availability
from holdfast.experiment.privacy_account import PrivacyAccount
from holdfast.experiment.records import prepare_round, restore, write_result
from holdfast.experiment.round_evaluation import evaluate_round
from holdfast.methods.context import Context
from holdfast.models.weights import Weights
from holdfast.storage.store import PreparedRound, Store


class Experiment:
    """One experiment. It is built from a config without writing to the disk; `steps` then goes through its
    rounds, in a run directory that the caller has opened."""

    def __init__(
        self,
        config: Config,
        out: Path,
        label: str = "",
        samples: Samples | None = None,
        ranks: Ranks | None = None,
    ):
        """`ranks` are the processes that run the experiment together; none: this one alone."""
        self.config, self.out, self.label = config, Path(out), label or Path(out).name
        self.parts: Parts = config.parts()
        self.method = self.parts.method
        self.key = Key(config.seed)
        self.federation = build_federation(config.data, self.key.fold("data"), samples)
        check_global_test(config, self.federation)
        config, self.parts = with_named_model(config, self.parts, self.federation.samples)
        self.config = config
        trainers = torch.tensor(
            [c for c in range(self.federation.clients) if c not in self.federation.held_out],
            dtype=torch.int64,
        )
        self.adversary = Adversary(
            self.parts.attack, trainers, self.key.fold("attack"), self.federation.names
        )
        self.rule, self.server = self.method.client_half(), self.method.Server(self.method)
        self.weights = Weights.of(self.parts.model)
        self.network = make_network(self.parts, self.federation.samples, config.train.dtype, self.weights)
        self.store = Store(self.out)
        # a run that has begun does not need the file with the weights again
        start = None if self.weights is None else self.store.start()
        self.initial = self.network.initial(self.key.fold("model")) if start is None else start
        config.train.augment.check(self.federation.samples.sample_shape)
        self.participation = Participation(
            trainers,
            self.key.fold("roster"),
            config.train.participation,
            read_availability(config.train.availability, self.federation.clients),
            draws_banned=self.method.draws_banned,
        )
        # how many users a dataset has is known only now
        check_cohort(self.parts.aggregator, self.participation.cohort_size())
        self.models, self.metrics = measured_models(config, self.parts), measured_metrics(config)
        self.run_context = make_run_context(
            config,
            self.parts,
            self.label,
            self.out,
            self.key,
            self.rule,
            self.network,
            self.initial,
            self.federation,
            self.adversary,
        )
        self.adversary.target = self._target()
        if ranks is not None:
            self.store.follows = ranks.rank > 0
            self.run_context.share = Share.by_work(ranks, self._steps_of_clients())
        self.privacy = PrivacyAccount.of(config.privacy, self.run_context)
        self.meter = Meter(self.rule.quiet)
        self.finished: dict[str, Any] | None = None
        self._start: dict[torch.device, Tensor] = {}
        self._heads: tuple[Wire, torch.device, Tensor] | None = None

    def _target(self) -> Target:
        """What attackers may learn about this experiment beside what is sent."""
        return Target(self.parts.aggregator, lambda: self.run_context.wire().layout(self.network.layout))

    def _steps_of_clients(self) -> Tensor:
        """About how many steps each client trains in a round."""
        train, counts = self.config.train, self.federation.train.counts.double()
        each = (counts / train.batch_size).ceil() * train.local_epochs
        return each if train.local_steps is None else each.clamp(max=1.0) * train.local_steps

    @property
    def rounds(self) -> int:
        return self.config.train.rounds

    @property
    def committed(self) -> int:
        """The last round that is known to be on disk: the one before the round that is under way, or the one
        before that while it is being written; -1 where even the start is not on disk."""
        return self.store.committed

    def steps(self) -> Generator[Exchange | Computation | PreparedRound, Any, dict[str, Any]]:
        """Run the experiment from its last committed round to its end. A finished run only returns its result
        again."""
        state, start = restore(self)
        if start is not None:
            yield start
        result = self.store.result()
        if result is not None:
            self.finished = result | {"run_dir": str(self.out)}
            return self.finished
        while self.run_context.round < self.rounds:
            ctx = self._begin_round()
            state, verdict = yield from self._metered(self.server.round(state, ctx))
            self.participation.ban(dict(verdict.banned))
            figures, arrays = yield from evaluate_round(self, state, ctx)
            yield prepare_round(self, state, ctx, verdict, figures, arrays)
        if self.run_context.round == self.rounds:
            yield from self._finish(state)
        self.finished = write_result(self)
        return self.finished

    def _begin_round(self) -> Context:
        self.run_context.round += 1
        self.run_context.rows.begin()
        return self.context()

    def _finish(self, state: State) -> Steps:
        """What a method does after the last round, if anything; it counts as one more round."""
        ctx = self._begin_round()
        finished = yield from self._metered(self.server.finish(state, ctx))
        if finished is state and not self.meter.exchanges:
            self.run_context.round -= 1
            return
        figures, arrays = yield from evaluate_round(self, finished, ctx, last=True)
        yield prepare_round(self, finished, ctx, Verdict(ctx.cohort[:0]), figures, arrays)

    def context(self) -> Context:
        """What the server half may know of this round."""
        round, train = self.run_context.round, self.config.train
        available = self.participation.available(round)
        cohort = self.participation.cohort(round, available)
        wire, samples = self.run_context.wire(), self.federation.samples
        return Context(
            round=round,
            cohort=cohort,
            available=available,
            key=self.key.fold("server", round),
            wire=wire,
            layout=self.network.layout,
            initial=wire.pack(self._first()),
            aggregator=self.parts.aggregator,
            detectors=self.parts.detectors,
            server_lr=train.server_lr,
            server=self.parts.server,
            weighting=self.parts.aggregator.weights,
            head=self._head(wire) if self.network.head_name else None,
            probe=Probe(self.network, samples.sample_shape, samples.words, wire, self._first()),
        )

    def _head(self, wire: Wire) -> Tensor:
        """bool: which of the parameters that travel belong to the head, where the server computes."""
        home = self.run_context.home
        if self._heads is None or self._heads[0] is not wire or self._heads[1] != home:
            head = wire.pack(self.network.head)[: wire.parameters]
            self._heads = wire, home, to_device(head, home)
        return self._heads[2]

    def _first(self) -> Tensor:
        """The start model where the server computes; it travels there once."""
        home = self.run_context.home
        if home not in self._start:  # "cuda" is not equal to the "cuda:0" of the tensors there
            self._start = {home: to_device(self.initial, home)}
        return self._start[home]

    def _metered(self, steps: Steps) -> Steps:
        """Pass the exchanges of a round on: number them, lose some replies where the config asks for it, and
        count bytes and seconds."""
        meter = self.meter = Meter(self.rule.quiet)

        def ask(exchange: Exchange | Computation) -> Steps:
            if isinstance(exchange, Computation):
                found = yield exchange
                meter.seconds["server"] += exchange.seconds
                return found
            exchange = replace(exchange, step=meter.next_step())
            with meter.timing("client"):
                up = yield from self.privacy.ask(self._lose(exchange))
            with meter.timing("server"):
                meter.count(exchange, up)
            return up

        return (yield from relay(steps, ask, partial(meter.timing, "server")))

    def _lose(self, exchange: Exchange) -> Exchange:
        """The exchange without the clients whose reply is lost: they need not be simulated, since the server
        sees the same."""
        if self.config.train.dropout == 0.0:
            return exchange
        luck = self.key.fold("dropout", self.run_context.round, exchange.step).fold(exchange.to).uniform()
        return exchange.only((luck >= self.config.train.dropout) | (exchange.to == ROOT))

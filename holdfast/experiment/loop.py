"""One experiment: the config's objects, and the run loop. The loop is a generator of exchanges, so whoever
carries them out, the simulator or a Flower server, drives the same lines."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.adversary import Adversary
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.keys import Key
from holdfast.core.types import ROOT, SCORE, Exchange, State, Uplink, Verdict
from holdfast.data.federation import Samples, build_federation, load_samples
from holdfast.engine.client_task import EVALUATE
from holdfast.engine.run_context import Measure, RunContext
from holdfast.evaluation import detection, metrics
from holdfast.experiment.config import Config, Parts, check_cohort
from holdfast.experiment.object_names import words
from holdfast.experiment.participation import Participation, read_availability
from holdfast.local.fit import Recipe
from holdfast.local.function_identity import described, name_of
from holdfast.methods.base import ClientRule
from holdfast.methods.context import Context, Timer
from holdfast.models.base import architecture, check_reads
from holdfast.models.network import Model, Network, check_fits, with_head
from holdfast.models.weights import Weights
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import PreparedRound, Store

Steps = Generator[Any, Any, Any]


class Experiment:
    """Built from a config without touching the disk; `play` then opens the run directory and goes round by
    round."""

    def __init__(self, config: Config, out: Path, label: str = "", samples: Samples | None = None):
        self.config, self.out, self.label = config, Path(out), label or Path(out).name
        self.parts: Parts = config.parts()
        self.method = self.parts.method
        self.key = Key(config.seed)
        self.federation = build_federation(config.data, self.key.fold("data"), samples)
        trainers = torch.tensor(
            [c for c in range(self.federation.clients) if c not in self.federation.held_out],
            dtype=torch.int64,
        )
        self.adversary = Adversary(self.parts.attack, trainers, self.key.fold("attack"))
        self.rule, self.server = self.method.client_half(), self.method.Server(self.method)
        self.weights = Weights.of(self.parts.model)
        self.network = make_network(self.parts, self.federation.samples, config.train.dtype, self.weights)
        self.store = Store(self.out)
        start = (
            None if self.weights is None else self.store.start()
        )  # a run that has begun does not need the file again
        self.initial = self.network.initial(self.key.fold("model")) if start is None else start
        config.train.augment.check(self.federation.samples.sample_shape)
        availability = read_availability(config.train.availability, self.federation.clients)
        self.participation = Participation(
            trainers,
            self.key.fold("roster"),
            config.train.participation,
            availability,
            draws_banned=self.method.draws_banned,
        )
        check_cohort(
            self.parts.aggregator, self.participation.cohort_size()
        )  # how many users a dataset has is known only now
        self.models = tuple(m for m in self.method.models if m in config.evaluate.models)
        self.metrics = tuple(dict.fromkeys(config.evaluate.metrics))
        self.run_context = self._run_context()
        self.meter = Meter(self.rule.quiet)
        self.finished: dict[str, Any] | None = None

    @property
    def rounds(self) -> int:
        return self.config.train.rounds

    @property
    def committed(self) -> int:
        """The last round on disk: that before the one which is under way. -1 where even the start is not
        there."""
        return self.run_context.round - (self.finished is None)

    def steps(self) -> Generator[Exchange | PreparedRound, Any, dict[str, Any]]:
        """The run: resume from the committed round, play the rest, finish. A finished run only says its
        result again."""
        (state, ready), run_context, server = self._restore(), self.run_context, self.server
        if ready is not None:
            yield ready
        result = self.store.result()
        if result is not None:
            self.finished = result | {"run_dir": str(self.out)}
            return self.finished
        while run_context.round < self.rounds:
            run_context.round += 1
            run_context.rows.begin()
            ctx = self.context()
            state, verdict = yield from self._metered(server.round(state, ctx))
            self.participation.ban(dict(verdict.banned))
            figures, arrays = yield from self._evaluate(state, ctx)
            yield self._ready(state, ctx, verdict, figures, arrays)
        if run_context.round == self.rounds:
            yield from self._finish(state)
        return self._conclude()

    def _finish(self, state: State) -> Steps:
        """What a method does after the last round, if anything; it counts as one more round."""
        run_context = self.run_context
        run_context.round += 1
        run_context.rows.begin()
        ctx = self.context()
        finished = yield from self._metered(self.server.finish(state, ctx))
        if finished is state and not self.meter.exchanges:
            run_context.round -= 1
            return
        state = finished
        figures, arrays = yield from self._evaluate(state, ctx, last=True)
        yield self._ready(state, ctx, Verdict(ctx.cohort[:0]), figures, arrays)

    def context(self) -> Context:
        """What the server half may know of this round."""
        round, train = self.run_context.round, self.config.train
        available = self.participation.available(round)
        cohort = self.participation.cohort(round, available)
        wire = self.run_context.wire()
        head = wire.pack(self.network.head)[: wire.parameters] if self.network.head_name else None
        return Context(
            round=round,
            cohort=cohort,
            available=available,
            key=self.key.fold("server", round),
            wire=wire,
            layout=self.network.layout,
            initial=wire.pack(self.initial),
            aggregator=self.parts.aggregator,
            detectors=self.parts.detectors,
            server_lr=train.server_lr,
            weighting=self.parts.aggregator.weights,
            head=head,
        )

    def _metered(self, steps: Steps) -> Steps:
        """Pass exchanges through, number them, lose some replies if asked to, and count bytes and seconds."""
        meter = self.meter = Meter(self.rule.quiet)
        started, up = time.perf_counter(), None
        while True:
            try:
                exchange = steps.send(up)
            except StopIteration as end:
                meter.server += time.perf_counter() - started
                return end.value
            exchange = replace(exchange, step=meter.next_step())
            meter.server += time.perf_counter() - started
            started = time.perf_counter()
            up = yield self._lose(exchange)
            meter.client += time.perf_counter() - started
            started = time.perf_counter()
            meter.count(exchange, up)

    def _lose(self, exchange: Exchange) -> Exchange:
        """A client whose reply is lost need not be played at all: the server sees the same."""
        if self.config.train.dropout == 0.0:
            return exchange
        luck = self.key.fold("dropout", self.run_context.round, exchange.step).fold(exchange.to).uniform()
        return exchange.only((luck >= self.config.train.dropout) | (exchange.to == ROOT))

    def _evaluate(
        self, state: State, ctx: Context, last: bool = False
    ) -> Generator[Exchange, Uplink, tuple[metrics.Figures, State]]:
        """Measure what the clients would use now. Off the books: no traffic is counted, no state is
        written."""
        if (
            not last
            and self.run_context.round % self.config.evaluate.every
            and self.run_context.round != self.rounds
        ):
            return {}, {}
        started = time.perf_counter()
        measured, late = self._measured(ctx), torch.tensor(self.federation.held_out, dtype=torch.int64)
        ids = torch.cat([measured, late]).unique()
        sent = yield from self.discarding(self.server.deliver(state, replace(ctx, timer=Timer()), ids))
        bank, pick = sent.bank, sent.pick
        reference = self.server.global_model(state)
        if {"global", "customised"} <= set(
            self.method.models
        ):  # the global model too, in front of the client's own
            assert reference is not None, (
                f"{self.method.name} has global models but its server half names none"
            )
            bank = torch.cat([bank, reference[None]])
            pick = torch.cat([torch.full((len(ids), 1), len(sent.bank), dtype=torch.int64), pick], dim=1)
        selected = torch.isin(ids, self.meter.took_part())
        up = yield Exchange(
            EVALUATE, ids, bank, pick, {**sent.extra, "selected": selected}, step=self.meter.next_step()
        )
        self.meter.refused.update(up.refused)
        selected = selected[torch.isin(ids, up.ids)]  # real clients may be missing
        benign = self.adversary.benign(up.ids, self.run_context.round)
        of_late = torch.isin(up.ids, late)
        counted, asked = benign & torch.isin(up.ids, measured), self.metrics
        figures = metrics.of_round(
            up.fields, counted, self.models, self.method.deploys, asked, has=self.method.models
        )
        figures |= metrics.of_late(up.fields, of_late, self.models, self.method.deploys)
        self.meter.evaluate += time.perf_counter() - started
        arrays = {"ids": up.ids, "selected": selected, **up.fields}
        shown = {"evaluate": torch.isin(up.ids, measured), **({"late": of_late} if len(late) else {})}
        return figures, {
            f"{of}/{name}": value[rows] for of, rows in shown.items() for name, value in arrays.items()
        }

    def discarding(self, steps: Steps) -> Steps:
        """Pass on what evaluation asks of clients: numbered after the round's own exchanges, and nothing of
        it is kept."""
        up = None
        while True:
            try:
                exchange = steps.send(up)
            except StopIteration as end:
                return end.value
            up = yield replace(exchange, step=self.meter.next_step(), discard_state=True)

    def _measured(self, ctx: Context) -> Tensor:
        """The clients that are evaluated; a banned client is still somebody's model and stays in the mean."""
        which, members = self.config.evaluate.clients, self.participation.clients
        if which == "cohort":
            return ctx.cohort
        if which == "held-out":
            return torch.tensor(self.federation.held_out, dtype=torch.int64)
        return (
            members[self.adversary.benign(members, self.run_context.round)] if which == "benign" else members
        )

    def _ready(
        self,
        state: State,
        ctx: Context,
        verdict: Verdict,
        figures: metrics.Figures,
        arrays: Mapping[str, Tensor],
    ) -> PreparedRound:
        """All of the round written; who drives makes it the truth."""
        meter, round, rows = self.meter, self.run_context.round, self.run_context.rows
        benign = self.adversary.benign(verdict.ids, round)
        figures = figures | self.method.round_figures(verdict, self.federation.facts, benign)
        seconds = {"client": meter.client, "server": meter.server, "evaluate": meter.evaluate}
        part = {
            "round": self.run_context.round,
            "metrics": {**figures, **meter.figures(), "rejected": len(verdict.rejected)},
            "exchanges": meter.exchanges,
            "seconds": seconds | {f"server/{name}": spent for name, spent in ctx.timer.spent.items()},
            "banned": {str(c): reason for c, reason in verdict.banned.items()},
            "rejected": {str(c): reason for c, reason in verdict.rejected.items()},
            "refused": {str(c): reason for c, reason in meter.refused.items()},
            "notes": list(verdict.notes),
            "fallback": verdict.fallback,
            "diverged": metrics.divergence(figures, meter.answers, set(self.adversary.at(round).tolist())),
            "attack": self.adversary.take_notes(),
        }
        tensors = {"cohort": ctx.cohort, "took_part": meter.took_part(), "verdict/ids": verdict.ids, **arrays}
        tensors |= {f"verdict/scores/{k}": v for k, v in verdict.scores.items()}
        tensors |= {f"verdict/tables/{k}": v for k, v in verdict.tables.items()}
        if verdict.weights is not None:
            tensors["verdict/weights"] = verdict.weights
        if self.adversary.redraws:
            tensors["malicious"] = self.adversary.at(round)
        server = {f"server/{k}": v for k, v in state.items()}
        return self.store.prepare(round, {**server, **self.participation.state()}, part, tensors, rows)

    def _restore(self) -> tuple[State, PreparedRound | None]:
        """The committed state, or the start: round 0 is to be committed too, so that a run exists on disk
        before it trains."""
        head = self.store.head()
        if head is not None:
            self.run_context.round, saved = head
            try:
                self.participation.restore(saved)
                self.run_context.rows = RowStore(self.out / "rows", saved["rows/index"])
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
                raise RunError(
                    f"{self.out}: the committed state of round {self.run_context.round} is damaged ({error})"
                ) from None
            self.store.tidy(
                self.run_context.round
            )  # a kill after the last commit may have left the state before it
            return {
                name.removeprefix("server/"): value
                for name, value in saved.items()
                if name.startswith("server/")
            }, None
        if self.weights is not None:
            self.store.write_start(self.initial)
        self.run_context.round = 0
        self.run_context.rows = RowStore(self.out / "rows")
        ctx = self.context()
        state = self.server.init(ctx)
        state |= {
            f"aggregator/{k}": v
            for k, v in self.parts.aggregator.init(ctx.wire.layout(self.network.layout)).items()
        }
        for place, detector in enumerate(self.parts.detectors):
            state |= {f"detector{place}/{k}": v for k, v in detector.init().items()}
        server = {f"server/{k}": v for k, v in state.items()}
        return state, self.store.prepare(
            0,
            {**server, **self.participation.state()},
            {"round": 0, "metrics": {}},
            {},
            self.run_context.rows,
        )

    def _conclude(self) -> dict[str, Any]:
        """Write the final figures beside the protocol they were measured by."""
        parts = self.store.parts(self.run_context.round)
        who = self.adversary.malicious, len(self.participation.clients), self.participation.banned
        final = metrics.of_run(parts, self.config.evaluate.targets, *who, self.metrics)
        final |= detection.of_rounds(self._seen(parts), decide=self.adversary.redraws)
        protocol = {
            **self.config.evaluate.model_dump(mode="json"),
            "models": list(self.models),
            "metrics": list(self.metrics),
        }
        protocol["deployed"] = self.method.deploys
        self.finished = {
            "run_dir": str(self.out),
            "rounds": self.rounds,
            "final": final,
            "protocol": protocol,
        }
        self.store.write_json("result.json", self.finished)
        return self.finished

    def _seen(self, parts: Sequence[Mapping[str, Any]]) -> list[detection.Seen]:
        """Every round's verdict beside the truth, where there is one to tell."""
        if not len(self.adversary.malicious):
            return []
        return [
            detection.Seen.of(part, self.store.arrays(part["round"]), self.adversary.at(part["round"]))
            for part in parts
        ]

    def _run_context(self) -> RunContext:
        train, evaluate = self.config.train, self.config.evaluate
        recipe = Recipe(
            lr=train.lr,
            epochs=train.local_epochs,
            steps=train.local_steps,
            batch_size=train.batch_size,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            shuffle=train.shuffle,
            drop_last=train.drop_last,
            augment=train.augment,
            loss=self.parts.loss,
        )
        poisoned = self.adversary.poison_data(
            self.federation, "test" if evaluate.test == "per-client" else "global_test"
        )
        validates, triggers = self.config.data.split.validation > 0, self.adversary.triggered is not None
        measure = Measure(
            self.models,
            evaluate.test,
            evaluate.unselected,
            validates,
            self.metrics,
            triggers,
            evaluate.selected,
        )
        return RunContext(
            label=self.label,
            key=self.key,
            method=self.method,
            rule=self.rule,
            network=self.network,
            initial=self.initial,
            federation=poisoned,
            recipe=recipe,
            lr_decay=train.lr_decay,
            measure=measure,
            rows=RowStore(self.out / "rows"),
            adversary=self.adversary,
            norm_cap=train.norm_cap,
        )


class Meter:
    """Bytes, seconds and refusals of one round."""

    def __init__(self, quiet: frozenset[str] = frozenset()) -> None:
        self.quiet = quiet | {SCORE}
        self.client = self.server = self.evaluate = 0.0
        self.up = self.down = self.exchanges = self.steps = 0
        self.asked: set[int] = set()
        self.losses: list[Tensor] = []
        self.answers: list[metrics.Answers] = []
        self.refused: dict[int, str] = {}
        self.answered: set[int] = set()

    def took_part(self) -> Tensor:
        """Clients that did something in this round; a client that was drawn but lost is not among them."""
        return torch.tensor(sorted(self.answered), dtype=torch.int64)

    def next_step(self) -> int:
        """Exchanges of a round are numbered from 0; those of its evaluation go on counting."""
        self.steps += 1
        return self.steps - 1

    def count(self, exchange: Exchange, up: Uplink) -> None:
        people, theirs = exchange.to != ROOT, up.ids[up.ids != ROOT].tolist()
        refused = {client: reason for client, reason in up.refused.items() if client != ROOT}
        self.exchanges += 1
        self.asked.update(exchange.to[people].tolist())
        self.down += int(exchange.bytes_down()[people].sum())
        self.up += int(up.bytes_up()[up.ids != ROOT].sum())
        self.refused.update(up.refused)
        self.answers.append((theirs, refused))
        if exchange.task not in self.quiet:
            self.answered.update(theirs, refused)
        if "loss" in up.fields:
            self.losses.append(up["loss"][up.ids != ROOT])

    def figures(self) -> metrics.Figures:
        losses = torch.cat(self.losses).double() if self.losses else torch.zeros(0)
        return {
            "bytes/up": self.up,
            "bytes/down": self.down,
            "cohort": len(self.asked),
            "refused": len(self.refused.keys() - {ROOT}),
            "loss/train": float(losses.mean()) if len(losses) else None,
        }


def make_network(parts: Parts, samples: Samples, dtype: str, weights: Weights | None = None) -> Network:
    """The method's network around the chosen model. Where its start comes from is not in its signature: it is
    one network all the same."""
    rule, model = parts.method.client_half(), parts.model
    built_by = name_of(type(rule).network)
    if type(rule).network is not ClientRule.network:  # which may read settings
        built_by += f" {described(parts.method.settings())}"
    if isinstance(model, Model):
        make, head, about = model.make, model.head, f"model {model.serial}"
    elif hasattr(model, "build"):
        check_reads(model, samples.sample_shape, samples.words)
        make, head = partial(model.build, samples.sample_shape, samples.classes), "head"
        about = (
            f"{name_of(type(model))} {described(architecture(model))} {samples.sample_shape}"
            f" {samples.classes}"
        )
    else:
        raise ConfigError(f"model '{model.name}' cannot be built")
    rule.head_name = head
    kind = torch.float64 if dtype == "float64" else torch.float32
    checked = not isinstance(model, Model) and type(model).__module__.startswith("holdfast.")

    def fresh() -> nn.Module:
        nonlocal checked
        module = with_head(make(), head)
        if not checked:  # once, on the first one that is made: a factory is not called more often for it
            name = words(model.source if isinstance(model, Model) else model)
            check_fits(module, name, samples.blank(kind).cpu(), samples.classes, samples.name)
            checked = True
        return rule.network(module)

    begin = None if weights is None else lambda: rule.network(weights.into(make().to(kind)))
    return Network(fresh, head and rule.head(head), f"{about} {built_by}", kind, begin)


def shared_samples(configs: list[Config]) -> list[Samples]:
    """One sample store for all experiments that use the same data, so that they can be fused."""
    loaded: dict[str, Samples] = {}
    out = []
    for config in configs:
        name = repr((config.data.name, config.data.options, config.data.dir))
        if name not in loaded:
            loaded[name] = load_samples(config.data)
        out.append(loaded[name])
    return out

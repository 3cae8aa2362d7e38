"""The simulator: carries out the exchanges of one experiment, or of many in lockstep, in one process.

Exchanges whose cells share a group key become one cohort: rows of all cells are stacked, trained together, and dealt out again. Memory
is bounded by working through the stack in chunks; private rows are read from disk for a chunk and written back after it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from holdfast.core.keys import Key
from holdfast.core.screen import screen
from holdfast.core.types import Exchange, State, Uplink
from holdfast.data.federation import Padded, Samples
from holdfast.engine.cell import Cell, join
from holdfast.engine.client import EVALUATE, Job, perform, schema_of
from holdfast.local.client import Local, Received, stack_states
from holdfast.local.plan import Plan


@dataclass(frozen=True)
class Call:
    """One cell's request."""

    cell: Cell
    exchange: Exchange


@dataclass
class Simulator:
    """One process that plays all clients."""

    plans: Mapping[str, Plan]
    """How each network's stacks are trained, by the network's signature."""
    device: torch.device = torch.device("cpu")
    seconds: float = 0.0
    """Time spent on clients so far."""

    def __post_init__(self) -> None:
        self._stores: dict[int, Samples] = {}

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        """Answer all calls, fusing those that share a group key."""
        started = time.perf_counter()
        groups: dict[tuple[object, ...], list[int]] = {}
        for place, call in enumerate(calls):
            groups.setdefault(call.cell.group(call.exchange.task), []).append(place)
        answers: dict[int, Uplink] = {}
        for places in groups.values():
            answers.update(zip(places, self._fused([calls[p] for p in places]), strict=True))
        self.seconds += time.perf_counter() - started
        return [answers[place] for place in range(len(calls))]

    def _fused(self, calls: list[Call]) -> list[Uplink]:
        fields: list[list[Mapping[str, Tensor]]] = [[] for _ in calls]
        for chunk in self._chunks(calls):
            state, sent = self._work(chunk)
            start = 0
            for place, part in chunk:
                rows = slice(start, start + len(part.exchange.to))
                start = rows.stop
                fields[place].append({name: value[rows].cpu() for name, value in sent.items()})
                if state is not None:
                    part.cell.rows.stage(part.exchange.to, {name: value[rows] for name, value in state.items()})
        return [self._answer(call, parts) for call, parts in zip(calls, fields, strict=True)]

    def _chunks(self, calls: list[Call]) -> list[list[tuple[int, Call]]]:
        """Cut the joint cohort into runs of at most `plan.rows` clients, remembering which call each piece belongs to."""
        chunks: list[list[tuple[int, Call]]] = [[]]
        most = self.plans[calls[0].cell.network.signature].rows
        room = most
        for place, call in enumerate(calls):
            start, n = 0, len(call.exchange.to)
            while start < n:
                if room == 0:
                    chunks.append([])
                    room = most
                stop = min(n, start + room)
                chunks[-1].append((place, Call(call.cell, call.exchange.only(torch.arange(start, stop)))))
                room -= stop - start
                start = stop
        return [chunk for chunk in chunks if chunk]

    def _work(self, chunk: list[tuple[int, Call]]) -> tuple[State | None, Mapping[str, Tensor]]:
        parts = [call for _, call in chunk]
        first = parts[0].cell
        local = self.local(parts)
        known = torch.cat([p.cell.rows.present(p.exchange.to) for p in parts])
        stored = [p.cell.rows.read(p.exchange.to[p.cell.rows.present(p.exchange.to)]) for p in parts]
        task = parts[0].exchange.task
        job = Job(
            task, self._received(parts, local),
            {k: self._put(torch.cat([p.exchange.extra[k] for p in parts])) for k in parts[0].exchange.extra},
            known, {k: self._put(v) for k, v in stack_states([s for s in stored if s]).items()},
            self.table([p.cell.test(p.exchange.to) for p in parts]) if task == EVALUATE else None, first.measure,
        )  # fmt: skip
        return perform(first.rule, local, job)

    def local(self, parts: list[Call]) -> Local:
        """The joint world of these clients; every number becomes one value per client."""
        first = parts[0].cell
        sizes = [len(p.exchange.to) for p in parts]

        def spread(values: list[float]) -> Tensor:
            return torch.cat([torch.full((n,), v, dtype=torch.float64) for n, v in zip(sizes, values, strict=True)])

        cells = [p.cell for p in parts]
        steps = None if first.recipe.steps is None else spread([float(c.recipe.steps or 0) for c in cells]).long()
        recipe = replace(
            first.recipe, lr=spread([c.lr() for c in cells]), epochs=spread([float(c.recipe.epochs) for c in cells]).long(), steps=steps,
            momentum=spread([float(c.recipe.momentum) for c in cells]), weight_decay=spread([float(c.recipe.weight_decay) for c in cells]),
        )  # fmt: skip
        settings = {name: spread([c.method.row_settings()[name] for c in cells]) for name in first.method.row_settings()}
        selected = [p.exchange.extra.get("selected", torch.ones(n, dtype=torch.bool)) for p, n in zip(parts, sizes, strict=True)]
        return Local(
            network=first.network, wire=first.wire(), ids=torch.cat([p.exchange.to for p in parts]),
            key=Key(torch.cat([client_key(p.cell.key, p.cell.round, p.exchange).bits for p in parts])),
            samples=self.on_device(first.federation.samples), data=self.table([p.cell.data(p.exchange.to) for p in parts]),
            validation=self.table([p.cell.validation(p.exchange.to) for p in parts]),
            initial=self._put(_joined([c.initial.expand(n, -1) for c, n in zip(cells, sizes, strict=True)])),
            recipe=recipe, plan=self.plans[first.network.signature], settings=SimpleNamespace(**settings),
            selected=torch.cat(selected), round=first.round,
        )  # fmt: skip

    def _received(self, parts: list[Call], local: Local) -> Received:
        """The banks of all cells end to end, and each client's place in them."""
        banks, picks, start = [], [], 0
        for part in parts:
            ex = part.exchange
            banks.append(ex.bank)
            picks.append(torch.where(ex.pick >= 0, ex.pick + start, ex.pick))
            start += ex.bank.shape[0]
        return Received(self._put(_joined(banks)), torch.cat(picks), local.wire)

    def _answer(self, call: Call, parts: list[Mapping[str, Tensor]]) -> Uplink:
        """One cell's rows together, as the malicious clients send them, screened."""
        cell, ex = call.cell, call.exchange
        schema = schema_of(cell.rule, ex.task, cell.wire(), cell.measure)
        fields = {name: torch.cat([p[name] for p in parts]) for name in parts[0]} if parts else {}
        up = Uplink(ex.to, fields)
        if not parts:
            return Uplink(ex.to, {name: torch.zeros(0, *field.shape, dtype=cell.network.dtype) for name, field in schema.items()})
        if ex.task == EVALUATE:
            return up
        up = cell.adversary.poison(ex.task, schema, up, cell.key.fold("attack", cell.round, ex.step))
        return screen(up, schema, cell.norm_cap)

    def on_device(self, samples: Samples) -> Samples:
        """The store on the device, moved once."""
        if self.device.type == "cpu":
            return samples
        return self._stores.setdefault(id(samples), samples.to(self.device))

    def table(self, parts: list[Padded]) -> Padded:
        whole = join(parts)
        return Padded(self._put(whole.rows), self._put(whole.labels), whole.count)

    def _put(self, value: Tensor) -> Tensor:
        return value.to(self.device)


def _joined(parts: list[Tensor]) -> Tensor:
    """torch.cat that leaves a single view a view: one model for a thousand clients is not copied a thousand times."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def client_key(key: Key, round: int, exchange: Exchange) -> Key:
    """One key per client: the same in a fused cohort, in a run alone, and on the client's own machine."""
    return key.fold("client", round, exchange.step).fold(exchange.to)

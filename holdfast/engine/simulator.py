"""The simulator: carries out the exchanges of one experiment, or of many in lockstep.

Exchanges whose cells share a group key become one cohort: rows of all cells are stacked, trained together,
and dealt out again. Memory is bounded by working through the stack in chunks; private rows are read from disk
for a chunk and written back after it. Where the plan has workers, the chunks are dealt to them. How a cohort
is cut depends on the plan and never on who was free, so the bits do not either."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from holdfast.core.device import deterministic_math, to_device
from holdfast.core.errors import DataError
from holdfast.core.files import readable
from holdfast.core.keys import Key
from holdfast.core.memory import give_back_memory
from holdfast.core.screening import screen
from holdfast.core.types import SCORE, Exchange, Schema, State, Uplink
from holdfast.data.federation import Padded
from holdfast.engine.client_stack import EVALUATE, Job, perform, schema_of
from holdfast.engine.host_threads import each, joined, on_host
from holdfast.engine.run_context import join
from holdfast.engine.worker_dispatch import Call, Done, WorkerDispatch
from holdfast.engine.workers import can_fork
from holdfast.local.client import Local, Received
from holdfast.local.per_client import Settings, handed
from holdfast.local.plan import Plan
from holdfast.local.programs import forget
from holdfast.storage.client_state import RowStore

__all__ = ["Call", "Simulator"]
_PORTIONS = 4  # for each worker, on plan `loop`
_Piece = tuple[int, Call, slice]
"""Of a chunk: which call it belongs to, what of it, and where in the chunk."""


NEEDS_SAMPLES = (
    'data.name = "declared" is for federations whose nodes bring their own data; a simulation needs samples'
)


@dataclass
class Simulator:
    """Plays all clients."""

    plans: Mapping[str, Plan]
    """How stacks are trained, by the cells' plan keys."""
    device: torch.device = torch.device("cpu")
    _dispatch: WorkerDispatch | None = None

    def close(self) -> None:
        """End the workers, if there are any, and give back what programs hold on a GPU."""
        if self._dispatch is not None:
            self._dispatch.close()
        if self.device.type == "cuda":
            forget()

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        """Answer all calls, fusing those that share a group key."""
        if not all(len(call.run_context.federation.samples) for call in calls):
            raise DataError(NEEDS_SAMPLES)
        groups: dict[tuple[object, ...], list[int]] = {}
        for place, call in enumerate(calls):
            ex = call.exchange
            width = (
                ex.pick.shape[1] if ex.task == SCORE else None
            )  # one column of the reply for each model: committees of one size only
            groups.setdefault((*call.run_context.group(ex.task), ex.discard_state, width), []).append(place)
        answers: dict[int, Uplink] = {}
        for places in groups.values():
            answers.update(zip(places, self._fused([calls[p] for p in places]), strict=True))
        return [answers[place] for place in range(len(calls))]

    def _fused(self, calls: list[Call]) -> list[Uplink]:
        return each(lambda pair: self._answer(*pair), list(zip(calls, self._gathered(calls), strict=True)))

    def _gathered(self, calls: list[Call]) -> list[dict[str, Tensor]]:
        """Carry out the calls chunk by chunk: private rows go to the disk, what each cell's clients send
        comes back."""
        fields: list[dict[str, Tensor]] = [{} for _ in calls]
        done = [0] * len(calls)
        chunks = self._chunks(calls)
        with closing(self._carried_out([[part for _, part in chunk] for chunk in chunks])) as answers:
            for chunk, (state, sent) in zip(chunks, answers, strict=True):
                state, sent = None if state is None else on_host(state), on_host(sent)
                each(partial(self._deal, calls, fields, done, state, sent), _pieces(chunk))
                if len(chunks) > 1:
                    state, sent = None, {}
                    if self.device.type == "cpu":
                        give_back_memory()
        return fields

    def _deal(
        self,
        calls: list[Call],
        fields: list[dict[str, Tensor]],
        done: list[int],
        state: State | None,
        sent: State,
        piece: _Piece,
    ) -> None:
        """One call's piece of a chunk: what its clients send to the rest of it, their private rows to the
        disk. A call has one piece of a chunk, so no two of them meet."""
        place, part, rows = piece
        end = done[place] + len(part.exchange.to)
        for name, value in sent.items():
            whole = fields[place].get(name)
            if whole is None:
                whole = fields[place][name] = self._room(calls[place], value)
            whole[done[place] : end] = value[rows]
        done[place] = end
        if state is not None:
            part.run_context.rows.stage(
                part.exchange.to, {name: value[rows] for name, value in state.items()}
            )

    def _carried_out(self, stacks: list[list[Call]]) -> Generator[Done, None, None]:
        """Each stack's outcome, in order: by the workers where there are any to share the work, else here."""
        workers = self.plans[stacks[0][0].run_context.plan_key].workers if stacks else 1
        done = 0
        if workers > 1 and len(stacks) > 1 and self.device.type == "cpu" and can_fork():
            self._dispatch = self._dispatch or WorkerDispatch(self.work, private_rows)
            for outcome in self._dispatch.carry_out(stacks, workers):
                done += 1
                yield outcome
        for stack in stacks[done:]:
            yield self.work(stack, *private_rows(stack, pinned=self.device.type == "cuda"))

    def _room(self, call: Call, like: Tensor) -> Tensor:
        """For what a whole cohort sends: memory, or, where that would exceed the bound, a file without a
        name, which goes when the tensor goes and which the system may keep on disk meanwhile."""
        run_context, shape = call.run_context, (len(call.exchange.to), *like.shape[1:])
        size, bound = math.prod(shape) * like.element_size(), self.plans[run_context.plan_key].memory
        if bound is None or size <= bound:
            return torch.empty(shape, dtype=like.dtype)
        with (
            readable(run_context.rows.path),
            tempfile.NamedTemporaryFile(dir=run_context.rows.path, prefix=".", suffix=".writing") as file,
        ):
            os.posix_fallocate(
                file.fileno(), 0, size
            )  # a full disk is an error here; later it would be a signal
            return torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=like.dtype).view(
                shape
            )

    def _chunks(self, calls: list[Call]) -> list[list[tuple[int, Call]]]:
        """Cut the joint cohort into runs that train at most `plan.rows` models, equally many for each worker,
        remembering which call each piece belongs to."""
        chunks: list[list[tuple[int, Call]]] = [[]]
        first = calls[0].run_context
        plan = self.plans[first.plan_key]
        most = max(1, plan.rows // first.rule.models_per_client)
        if plan.workers > 1:
            total = max(1, sum(len(call.exchange.to) for call in calls))
            # one by one, clients may as well come in smaller portions: who has had clients with little data
            # takes more of them
            turns = max(-(-total // (most * plan.workers)), _PORTIONS if plan.name == "loop" else 1)
            most = -(-total // (turns * plan.workers))
        room = most
        for place, call in enumerate(calls):
            start, n = 0, len(call.exchange.to)
            while start < n:
                if room == 0:
                    chunks.append([])
                    room = most
                stop = min(n, start + room)
                piece = call.exchange.only(torch.arange(start, stop))
                chunks[-1].append(
                    (place, Call(call.run_context, piece if plan.workers == 1 else picked_only(piece)))
                )
                room -= stop - start
                start = stop
        return [chunk for chunk in chunks if chunk]

    def work(self, parts: list[Call], known: Tensor, stored: State) -> Done:
        """Carry out one stack of calls, given the private rows of the clients that have any: the new private
        rows (None: nothing changes) and the fields to send. A real client is a stack of one."""
        first = parts[0].run_context
        local = self.local(parts)
        task = parts[0].exchange.task
        job = Job(
            task,
            self._received(parts, local),
            {
                k: self._to_device(torch.cat([p.exchange.extra[k] for p in parts]))
                for k in parts[0].exchange.extra
            },
            known,
            {k: self._to_device(v) for k, v in stored.items()},
            self.table([p.run_context.test(p.exchange.to) for p in parts]) if task == EVALUATE else None,
            first.measure,
            (
                self.table([p.run_context.triggered(p.exchange.to) for p in parts])
                if task == EVALUATE and first.measure.trigger
                else None
            ),
        )
        with deterministic_math(self.device, local.plan.precision):
            try:
                state, fields = perform(first.rule, local, job)
            except (
                torch.OutOfMemoryError
            ):  # programs of other networks may hold what is missing; nothing was changed yet
                forget()
                state, fields = perform(first.rule, local, job)
        return None if parts[0].exchange.discard_state else state, fields

    def local(self, parts: list[Call]) -> Local:
        """The joint world of these clients; every number becomes one value per client."""
        first = parts[0].run_context
        sizes = [len(p.exchange.to) for p in parts]

        def spread(values: list[float]) -> Tensor:
            return torch.cat(
                [torch.full((n,), v, dtype=torch.float64) for n, v in zip(sizes, values, strict=True)]
            )

        cells = [p.run_context for p in parts]
        steps = (
            None if first.recipe.steps is None else spread([float(c.recipe.steps or 0) for c in cells]).long()
        )
        numbers: dict[str, Any] = dict(
            lr=spread([c.lr() for c in cells]),
            epochs=spread([float(c.recipe.epochs) for c in cells]).long(),
            steps=steps,
            momentum=spread([float(c.recipe.momentum) for c in cells]),
            weight_decay=spread([float(c.recipe.weight_decay) for c in cells]),
        )
        recipe = replace(first.recipe, **handed("recipe", numbers))
        rows = [c.method.row_settings() for c in cells]
        settings = {name: spread([row[name] for row in rows]).to(first.network.dtype) for name in rows[0]}
        selected = [
            p.exchange.extra.get("selected", torch.ones(n, dtype=torch.bool))
            for p, n in zip(parts, sizes, strict=True)
        ]
        return Local(
            network=first.network,
            wire=first.wire(),
            ids=torch.cat([p.exchange.to for p in parts]),
            key=Key(
                torch.cat(
                    [client_key(p.run_context.key, p.run_context.round, p.exchange).bits for p in parts]
                )
            ),
            samples=first.federation.samples.on(self.device),
            data=self.table([p.run_context.data(p.exchange.to) for p in parts]),
            validation=self.table([p.run_context.validation(p.exchange.to) for p in parts]),
            initial=self._initial([c.initial for c in cells], sizes),
            recipe=recipe,
            plan=self.plans[first.plan_key],
            settings=Settings(**handed("settings", settings, self._to_device)),
            selected=torch.cat(selected),
            round=first.round,
            facts={
                name: self._to_device(torch.cat([p.run_context.fact(name, p.exchange.to) for p in parts]))
                for name in sorted(first.rule.knows)
            },
        )

    def _initial(self, models: list[Tensor], sizes: list[int]) -> Tensor:
        """Each client's first model. Every cell's travels once, and is multiplied where it is needed."""
        there = {key: self._to_device(model) for key, model in {id(model): model for model in models}.items()}
        return _end_to_end([there[id(model)].expand(n, -1) for model, n in zip(models, sizes, strict=True)])

    def _received(self, parts: list[Call], local: Local) -> Received:
        """The banks of all cells end to end, and each client's place in them."""
        banks, picks, start = [], [], 0
        for part in parts:
            ex = part.exchange
            banks.append(ex.bank)
            picks.append(torch.where(ex.pick >= 0, ex.pick + start, ex.pick))
            start += ex.bank.shape[0]
        widest = max(pick.shape[1] for pick in picks)
        picks = [torch.nn.functional.pad(pick, (0, widest - pick.shape[1]), value=-1) for pick in picks]
        return Received(joined(banks, self.device), torch.cat(picks), local.wire)

    def _answer(self, call: Call, fields: Mapping[str, Tensor]) -> Uplink:
        """One cell's rows together, as the malicious clients send them, screened."""
        run_context, ex = call.run_context, call.exchange
        schema = schema_of(run_context.rule, ex, run_context.wire(), run_context.measure)
        up = Uplink(ex.to, fields)
        if not len(ex.to):
            return nobody(schema, run_context.network.dtype)
        if ex.task == EVALUATE:
            return up
        up = run_context.adversary.poison(
            ex.task,
            schema,
            up,
            run_context.key.fold("attack", run_context.round, ex.step),
            run_context.round,
            ex,
        )
        return screen(up, schema, run_context.norm_cap)

    def table(self, parts: list[Padded]) -> Padded:
        whole = join(parts)
        return Padded(self._to_device(whole.rows), self._to_device(whole.labels), whole.count)

    def _to_device(self, value: Tensor) -> Tensor:
        return to_device(value, self.device)


def _pieces(chunk: list[tuple[int, Call]]) -> list[_Piece]:
    ends = list(accumulate(len(part.exchange.to) for _, part in chunk))
    return [
        (place, part, slice(start, end))
        for (place, part), start, end in zip(chunk, [0, *ends], ends, strict=False)
    ]


def private_rows(calls: list[Call], pinned: bool = False) -> tuple[Tensor, State]:
    """Which of these clients have private rows on disk, and those rows; for a GPU in page-locked memory."""
    known = [call.run_context.rows.present(call.exchange.to) for call in calls]
    asked = [
        (call.run_context.rows, call.exchange.to[there])
        for call, there in zip(calls, known, strict=True)
        if bool(there.any())
    ]
    ends = list(accumulate(len(ids) for _, ids in asked))
    whole = asked[0][0].room(ends[-1], pinned) if asked else {}

    def read(piece: tuple[RowStore, Tensor, int]) -> None:
        rows, ids, end = piece
        rows.read(ids, {name: value[end - len(ids) : end] for name, value in whole.items()})

    each(read, [(rows, ids, end) for (rows, ids), end in zip(asked, ends, strict=True)])
    return torch.cat(known), whole


def picked_only(exchange: Exchange) -> Exchange:
    """The same request without the models that none of its clients receives: a worker need not be sent
    them."""
    used, place = exchange.pick.clamp(min=0).unique(return_inverse=True)
    if exchange.bank.shape[0] <= 1 or not len(used):
        return exchange
    return replace(
        exchange, bank=exchange.bank[used], pick=torch.where(exchange.pick >= 0, place, exchange.pick)
    )


def nobody(schema: Schema, dtype: torch.dtype) -> Uplink:
    """The answer of no client at all."""
    fields = {
        name: torch.zeros(0, *field.shape, dtype=field.dtype or dtype) for name, field in schema.items()
    }
    return Uplink(torch.zeros(0, dtype=torch.int64), fields)


def _end_to_end(parts: list[Tensor]) -> Tensor:
    """torch.cat that leaves a single view a view: one model for a thousand clients is not copied a thousand
    times."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def client_key(key: Key, round: int, exchange: Exchange) -> Key:
    """One key per client: the same in a fused cohort, in a run alone, and on the client's own machine."""
    return key.fold("client", round, exchange.step).fold(exchange.to)

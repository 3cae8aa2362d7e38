"""The simulator: answers the exchanges of one experiment, or of many that run in lockstep.

An exchange goes through these stages, in this order:

    group      calls of experiments that share a group key become one cohort
    train      malicious clients whose attack has a training of its own do it first (engine/own_training.py)
    split      the cohort is cut into chunks that fit the memory bound
    execute    the clients of a chunk perform their task as one stack, here or in a worker process
    scatter    what the clients send goes back to the call that asked; their private rows go to the disk, on a
               GPU also to its memory
    protect    honest clients clip and noise what they send, where [privacy] asks for it
    attack     malicious clients change what they send
    screen     replies that break the schema of their task are refused

How a cohort is split depends on the plan and never on which worker is free, so the bits do not either."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.core.errors import DataError
from holdfast.core.keys import Key
from holdfast.core.memory import give_back_memory
from holdfast.core.screening import screen, screen_together
from holdfast.core.together import Computation, in_lockstep
from holdfast.core.types import SCORE, Schema, State, Uplink, without_unused_models
from holdfast.engine.client_stack import PASSES, ClientStack, TaskResult
from holdfast.engine.client_task import EVALUATE, schema_of
from holdfast.engine.device_rows import DeviceRows, read_rows
from holdfast.engine.host_threads import each
from holdfast.engine.own_training import trained_by_attackers, with_trigger
from holdfast.engine.replies import LARGE, Replies
from holdfast.engine.run_context import Call
from holdfast.engine.worker_dispatch import WorkerDispatch
from holdfast.engine.workers import can_fork
from holdfast.local.client import stack_states
from holdfast.local.plan import Plan
from holdfast.local.programs import forget
from holdfast.privacy.protection import keyed_normal, updates

__all__ = ["Call", "Simulator"]
_PORTIONS = 4  # for each worker, on plan `loop`
NEEDS_SAMPLES = (
    'data.name = "declared" is for federations whose nodes bring their own data; a simulation needs samples'
)


@dataclass(frozen=True)
class Part:
    """What one call has in a chunk."""

    place: int
    """Of the call in its group."""
    call: Call
    """The request to these clients alone."""
    clients: slice
    """Where they are among all clients of the call."""
    rows: slice
    """Where they are in the chunk."""


Chunk = list[Part]


@dataclass
class Simulator:
    """Answers exchanges by simulating all clients."""

    plans: Mapping[str, Plan]
    """How stacks are trained, by the experiments' plan keys."""
    device: torch.device = torch.device("cpu")
    writes_behind: ClassVar[bool] = True
    """A round is written while the next one trains: no client of a simulation has to know that it counts."""
    replies_on_device: ClassVar[bool] = True
    """What clients send may stay on the device that trains, where servers compute on it, too."""
    clients: ClientStack = field(init=False)
    _rows: DeviceRows | None = field(init=False, default=None)
    """What keeps private rows between rounds, where that is not the disk alone."""
    _dispatch: WorkerDispatch | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.clients = ClientStack(self.plans, self.device)
        if self.device.type != "cpu":
            self._rows = DeviceRows(self.device)

    def close(self) -> None:
        """End the workers, if there are any, and give back what programs hold on a GPU."""
        if self._dispatch is not None:
            self._dispatch.close()
        self._rows = None
        if self.device.type == "cuda":
            forget()

    # ---- the path of an exchange

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        """Answer all calls; those of one group are worked on together."""
        if not all(len(call.run_context.federation.samples) for call in calls):
            raise DataError(NEEDS_SAMPLES)
        answers: dict[int, Uplink] = {}
        for places in self._group(calls):
            answers.update(zip(places, self._answer_group([calls[p] for p in places]), strict=True))
        return [answers[place] for place in range(len(calls))]

    def _answer_group(self, calls: list[Call]) -> list[Uplink]:
        trained = self.trained(calls)
        return self.received(calls, self.performed(calls), trained)

    def trained(self, calls: list[Call]) -> list[Uplink | None]:
        """What the own training of malicious clients leaves, by call."""
        return trained_by_attackers(calls, [schema_for(call) for call in calls], self.worked)

    def worked(self, calls: list[Call]) -> list[Uplink]:
        """What malicious clients find in work of their own: those of one group as one cohort."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for place, call in enumerate(calls):
            handed = [(name, v.shape[1:], v.dtype) for name, v in call.exchange.extra.items()]
            key = (
                call.work,
                *call.run_context.attackers(),
                *call.run_context.group(call.exchange.task),
                *handed,
            )
            groups.setdefault(key, []).append(place)
        found: dict[int, Uplink] = {}
        for places in groups.values():
            found.update(zip(places, self._work_together([calls[p] for p in places]), strict=True))
        return [found[place] for place in range(len(calls))]

    def _work_together(self, calls: list[Call]) -> list[Uplink]:
        home = calls[0].run_context.home
        pieces: list[list[Mapping[str, Tensor]]] = [[] for _ in calls]
        chunks = self._split(calls)
        with closing(self._execute(chunks)) as results:
            for chunk, (_, sent) in zip(chunks, results, strict=True):
                there = {name: value.detach().to(home) for name, value in sent.items()}
                for part in chunk:
                    pieces[part.place].append({name: value[part.rows] for name, value in there.items()})
        return [
            Uplink(call.exchange.to, stack_states(parts)) for call, parts in zip(calls, pieces, strict=True)
        ]

    def performed(self, calls: list[Call]) -> list[Uplink]:
        """What honest clients send. Chunk by chunk, so that memory is bounded: few results exist at a
        time."""
        calls = [with_trigger(call) for call in calls]
        context = calls[0].run_context
        replies = Replies(calls, schema_for(calls[0]), context.home, self.plans[context.plan_key].memory)
        chunks = self._split(calls)
        with closing(self._execute(chunks)) as results:
            for chunk, (state, sent) in zip(chunks, results, strict=True):
                self._scatter(chunk, state, replies.take(sent), replies)
                if len(chunks) > 1:
                    state, sent = None, {}
                    if self.device.type == "cpu":
                        give_back_memory()
        items = [(call, schema_for(call), replies.of(place)) for place, call in enumerate(calls)]
        each(lambda item: self._protect(*item), items)
        return [Uplink(call.exchange.to, reply) for call, _, reply in items]

    def received(
        self, calls: list[Call], sent: list[Uplink], trained: Sequence[Uplink | None]
    ) -> list[Uplink]:
        """What the servers are given, after malicious clients changed what they send, and screening."""
        schemas = [schema_for(call) for call in calls]
        each_call = zip(calls, schemas, sent, trained, strict=True)
        attacked = in_lockstep([self._attack(*item) for item in each_call], each)
        return self._screen(calls, schemas, attacked)

    # ---- its stages

    def _group(self, calls: Sequence[Call]) -> list[list[int]]:
        """The places of the calls that can be worked on as one cohort."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for place, call in enumerate(calls):
            ex = call.exchange
            # a score has one column for each model, so only committees of one size fit together
            width = ex.pick.shape[1] if ex.task == SCORE else None
            groups.setdefault((*call.run_context.group(ex.task), ex.discard_state, width), []).append(place)
        return list(groups.values())

    def _split(self, calls: list[Call]) -> list[Chunk]:
        """Chunks that train at most `plan.rows` models each, equally many chunks for each worker."""
        chunks: list[Chunk] = [[]]
        plan, most = self.plans[calls[0].run_context.plan_key], self._clients_of_a_chunk(calls)
        used = 0  # rows of the last chunk
        for place, call in enumerate(calls):
            start, n = 0, len(call.exchange.to)
            while start < n:
                if used == most:
                    chunks.append([])
                    used = 0
                stop = min(n, start + most - used)
                exchange = call.exchange.only(torch.arange(start, stop))
                if plan.workers > 1:
                    exchange = without_unused_models(exchange)
                end = used + stop - start
                chunks[-1].append(
                    Part(place, replace(call, exchange=exchange), slice(start, stop), slice(used, end))
                )
                start, used = stop, end
        return [chunk for chunk in chunks if chunk]

    def _execute(self, chunks: list[Chunk]) -> Generator[TaskResult, None, None]:
        """The result of each chunk, in order: from the workers where there are any to share the work, else
        from this process."""
        stacks = [[part.call for part in chunk] for chunk in chunks]
        workers = self.plans[stacks[0][0].run_context.plan_key].workers if stacks else 1
        done = 0
        if workers > 1 and len(stacks) > 1 and self.device.type == "cpu" and can_fork():
            self._dispatch = self._dispatch or WorkerDispatch(self.clients.perform, private_rows)
            for result in self._dispatch.carry_out(stacks, workers):
                done += 1
                yield result
        read = private_rows if self._rows is None else self._rows.read
        for stack in stacks[done:]:
            yield self.clients.perform(stack, *read(stack))

    def _scatter(
        self, chunk: Chunk, state: State | None, sent: Mapping[str, Tensor], replies: Replies
    ) -> None:
        """Copy what a chunk's clients send into the replies to their calls, and stage their private rows. A
        call has at most one part in a chunk, so parts can be handled at the same time."""

        def scatter_part(part: Part) -> None:
            for name, value in sent.items():
                replies.put(name, part.place, part.clients, value[part.rows])
            if state is not None and self._rows is None:
                rows = {name: value[part.rows] for name, value in state.items()}
                part.call.run_context.rows.stage(part.call.exchange.to, rows)

        each(scatter_part, chunk)
        if state is not None and self._rows is not None:
            pieces = [(part.call.run_context.rows, part.call.exchange.to, part.rows) for part in chunk]
            self._rows.stage(pieces, state)

    def _protect(self, call: Call, schema: Schema, reply: dict[str, Tensor]) -> None:
        """Protect the reply of each honest client, in place, as its node would in a federation; only that the
        noise comes from the run's key, so that it can be repeated. A malicious client does as it likes, and
        an evaluation is measured by the simulator, not sent by clients. An update that is not finite is left
        to screening."""
        run_context, ex = call.run_context, call.exchange
        trained = reply.pop(PASSES, None)
        run_context.passes = None if trained is None else (ex.to, trained)
        protection = run_context.privacy
        if protection is None or ex.task == EVALUATE or not len(ex.to):
            return
        honest = ex.is_client & ~torch.isin(ex.to, run_context.adversary.at(run_context.round))
        if protection.settings.others == "withhold" and "count" in reply:
            # the weight of an attacker stays that of a client: to claim another would be an attack of its own
            reply["count"][ex.is_client & ~honest] = float(protection.settings.count)
        keys = run_context.key.fold("privacy", run_context.round, ex.step).fold(ex.to)
        for row in honest.nonzero().flatten().tolist():
            sent = {name: value[row : row + 1] for name, value in reply.items()}
            if not all(bool(sent[name].isfinite().all()) for name in updates(schema)):
                continue
            for name, value in protection.protect(
                sent, schema, ex.task, keyed_normal(Key(keys.bits[row]))
            ).items():
                reply[name][row : row + 1] = value

    def _attack(
        self, call: Call, schema: Schema, up: Uplink, trained: Uplink | None
    ) -> Generator[Computation, Any, Uplink]:
        """The reply as the malicious clients send it. Evaluation is not attacked. On a device, attackers
        write into the replies, which then stay next to each other."""
        run_context, ex = call.run_context, call.exchange
        if ex.task == EVALUATE or not len(ex.to):
            return up
        key, in_place = run_context.key.fold("attack", run_context.round, ex.step), _on_device(call)
        attacking = run_context.adversary.poisoning(
            ex.task, schema, up, key, run_context.round, ex, in_place=in_place, trained=trained
        )
        return (yield from attacking)

    def _screen(self, calls: list[Call], schemas: list[Schema], ups: list[Uplink]) -> list[Uplink]:
        """The replies without the rows that break the schema of the task. Evaluation is not screened."""
        answers = list(ups)
        asked: list[int] = []
        for place, call in enumerate(calls):
            if not len(call.exchange.to):
                context = call.run_context
                answers[place] = empty_uplink(schemas[place], context.network.dtype, context.home)
            elif call.exchange.task != EVALUATE:
                asked.append(place)
        caps = [call.run_context.norm_cap for call in calls]
        if _on_device(calls[0]):
            good = screen_together(
                [ups[place] for place in asked],
                [schemas[place] for place in asked],
                [caps[place] for place in asked],
            )
        else:
            good = each(lambda place: screen(ups[place], schemas[place], caps[place]), asked)
        for place, up in zip(asked, good, strict=True):
            answers[place] = up
        return answers

    # ---- what the stages need

    def _clients_of_a_chunk(self, calls: list[Call]) -> int:
        first = calls[0].run_context
        plan = self.plans[first.plan_key]
        most = max(1, plan.rows // first.rule.models_per_client)
        if plan.workers == 1:
            return most
        total = max(1, sum(len(call.exchange.to) for call in calls))
        # plan `loop` trains one client after the other, so its chunks may be smaller: a worker whose clients
        # have little data takes more chunks
        turns = max(-(-total // (most * plan.workers)), _PORTIONS if plan.name == "loop" else 1)
        return -(-total // (turns * plan.workers))


def private_rows(calls: list[Call]) -> tuple[Tensor, State]:
    """Which of these clients have private rows on disk, and those rows."""
    known = [call.run_context.rows.present(call.exchange.to) for call in calls]
    asked = [
        (call.run_context.rows, call.exchange.to[there])
        for call, there in zip(calls, known, strict=True)
        if bool(there.any())
    ]
    return torch.cat(known), read_rows(asked, torch.device("cpu"))


def empty_uplink(schema: Schema, dtype: torch.dtype, home: torch.device | str = "cpu") -> Uplink:
    """The reply of a cohort without clients; its fields are where those of a cohort with clients are."""
    fields = {
        name: torch.zeros(0, *field.shape, dtype=field.dtype or dtype).to(
            home if field.kind in LARGE else "cpu"
        )
        for name, field in schema.items()
    }
    return Uplink(torch.zeros(0, dtype=torch.int64), fields)


def _on_device(call: Call) -> bool:
    return call.run_context.home.type != "cpu"


def schema_for(call: Call) -> Schema:
    context = call.run_context
    return schema_of(context.rule, call.exchange, context.wire(), context.measure)

"""One experiment on several processes: each simulates some of the clients, and all aggregate together.

Every rank goes through the same rounds with the same server half. Where the ranks meet:

    perform     a rank trains its own clients, whose private rows it keeps; so it does what attackers do
                before
    exchange    updates go from rows to columns in one all-to-all, so that a rank has some columns of all of
                them; whole updates are gathered for a server half that looks at them itself. All other fields
                are gathered
    receive     attacks, screening, detectors and aggregators compute on these columns (core/columns.py)
    commit      every rank writes its private rows; then the first rank commits the round

Which clients a rank has depends on their work alone, and what the ranks add up does not depend on how many
there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.core.columns import Columns, reads_of, warn_of_rows
from holdfast.core.errors import RunError
from holdfast.core.files import sync
from holdfast.core.share import Share
from holdfast.core.types import SCORE, UPDATE, State, Uplink, without_unused_models
from holdfast.engine.client_task import EVALUATE
from holdfast.engine.own_training import trained_by_attackers
from holdfast.engine.ranks import all_well, on_first
from holdfast.engine.run_context import Call, RunContext
from holdfast.engine.simulator import Simulator, empty_uplink, schema_for
from holdfast.local.plan import Plan
from holdfast.storage.store import PreparedRound, settle_all, write_all


@dataclass
class Distributed:
    """Answers the exchanges of one experiment together with the other ranks."""

    simulator: Simulator
    share: Share
    whole_rows: bool
    """Whether the server half looks at whole updates."""
    replies_on_device = True

    def close(self) -> None:
        self.simulator.close()

    def exchange(self, calls: Sequence[Call]) -> list[Uplink]:
        (call,) = calls
        rows = call.run_context.rows
        before = dict(rows.staged)
        if not call.exchange.discard_state:
            rows.reserve(call.exchange.to)
        (trained,) = trained_by_attackers([call], [schema_for(call)], self._worked)
        sent: dict[str, Tensor] = {}
        error: Exception | None = None
        try:
            sent = self._perform(call)
        except torch.OutOfMemoryError as raised:  # else this rank alone would try again
            error = RunError(f"memory ran out: {raised}")
        except Exception as raised:
            error = raised
        all_well(self.share.ranks, error)
        rows.adopt(any(self.share.ranks.agree(rows.staged != before)))
        return self.simulator.received([call], [self._exchanged(call, sent)], [trained])

    def _worked(self, calls: list[Call]) -> list[Uplink]:
        """What all malicious clients find in work of their own, of which this rank does that of its own
        clients."""
        mine = [call.exchange.only(self.share.mine(call.exchange.to)) for call in calls]
        asked = [replace(call, exchange=ex) for call, ex in zip(calls, mine, strict=True) if len(ex.to)]
        error: Exception | None = None
        found: list[Uplink] = []
        try:
            found = self.simulator.worked(asked)
        except torch.OutOfMemoryError as raised:
            error = RunError(f"memory ran out: {raised}")
        except Exception as raised:
            error = raised
        all_well(self.share.ranks, error)
        done = iter(found)
        return [
            self._gathered(call, next(done).fields if len(ex.to) else {})
            for call, ex in zip(calls, mine, strict=True)
        ]

    def _perform(self, call: Call) -> dict[str, Tensor]:
        """What this rank's own clients send; nothing where it has none in this exchange."""
        mine = self.share.mine(call.exchange.to)
        call.run_context.passes = None
        if not bool(mine.any()):
            return {}
        exchange = without_unused_models(call.exchange.only(mine))
        (up,) = self.simulator.performed([Call(call.run_context, exchange)])
        return dict(up.fields)

    def _exchanged(self, call: Call, sent: Mapping[str, Tensor]) -> Uplink:
        """The replies of all clients. All ranks have all of them, of updates some columns or, for a server
        half that looks at them, all columns."""
        context, ids = call.run_context, call.exchange.to
        owners, schema = self.share.of(ids), schema_for(call)
        if not len(ids):
            return empty_uplink(schema, context.network.dtype, context.home)
        self._exchange_passes(call, owners)
        return self._gathered(call, sent)

    def _gathered(self, call: Call, sent: Mapping[str, Tensor]) -> Uplink:
        """What clients of all ranks send or find, of which this one has those of its own."""
        context, ids = call.run_context, call.exchange.to
        owners = self.share.of(ids)
        fields: dict[str, Tensor] = {}
        columns: Columns | None = None
        for name, value in self._of_all(sent, context.home).items():
            shared = Columns(value.shape[1], self.share.ranks) if name == UPDATE and value.ndim == 2 else None
            if shared is not None and not self.whole_rows:
                columns = shared
                fields[name] = columns.of_rows(value, owners)
                continue
            fields[name] = _by_client(self.share.ranks.gather(value), owners)
            if shared is not None:
                warn_of_rows(f"method '{context.method.name}'", shared, value.element_size())
        return Uplink(ids, fields, columns=columns)

    def _of_all(self, sent: Mapping[str, Tensor], home: torch.device) -> dict[str, Tensor]:
        """The fields that clients send, in one order; without rows on a rank that has no clients here."""
        mine = {
            name: [str(value.dtype), list(value.shape[1:]), value.device.type != "cpu"]
            for name, value in sorted(sent.items())
        }
        said = [spec for spec in self.share.ranks.agree(mine) if spec]
        if any(spec != said[0] for spec in said):
            raise RunError(f"clients of different ranks send different fields: {said[0]} and {said[-1]}")
        fields = {}
        for name, (dtype, shape, on_device) in (said[0] if said else {}).items():
            kind = getattr(torch, dtype.removeprefix("torch."))
            empty = torch.empty(0, *shape, dtype=kind, device=home if on_device else "cpu")
            fields[name] = sent.get(name, empty)
        return fields

    def _exchange_passes(self, call: Call, owners: Tensor) -> None:
        """Under DP-SGD: how often all clients trained, of which each rank knows its own."""
        context = call.run_context
        if context.recipe.sample_clip is None or call.exchange.task in (EVALUATE, SCORE):
            return
        mine = torch.zeros(0, 2).long() if context.passes is None else context.passes[1]
        context.passes = call.exchange.to, _by_client(self.share.ranks.gather(mine), owners)

    def commit(self, ready: Sequence[PreparedRound]) -> None:
        """Every rank writes its private rows and waits for the disk, then the first rank commits."""
        ranks, error = self.share.ranks, None  # type: tuple[Any, Exception | None]
        try:
            for one in ready:
                if one.rows is not None:
                    one.rows.write()
                for file in one.written:
                    sync(file)
        except Exception as raised:
            error = raised
        all_well(ranks, error)
        for one in ready:
            self._check_alike(one)
        on_first(ranks, lambda: write_all(ready))
        settle_all(ready)

    def _check_alike(self, ready: PreparedRound) -> None:
        """All ranks must have computed the same round: what they decide from it would differ otherwise."""
        tensors: State = {}
        for file, content in ready.content.items():
            if file.startswith("state/") and not isinstance(content, bytes):
                tensors |= content
        for rank, sums in enumerate(said := self.share.ranks.agree(_sums(tensors))):
            for name, value in sums.items():
                if said[0].get(name) != value:
                    raise RunError(
                        f"ranks 0 and {rank} computed different numbers in round {ready.round} ('{name}');"
                        " start all ranks on machines of one kind, with the same versions"
                    )


def by_ranks(run_context: RunContext) -> Callable[[Mapping[str, Plan], torch.device], Distributed]:
    """Makes the engine of an experiment that several processes run."""
    share, method = run_context.share, run_context.method
    assert share is not None
    whole_rows = reads_of(method.Server(method)) == "rows"
    return lambda plans, device: Distributed(Simulator(plans, device), share, whole_rows)


def _by_client(parts: Sequence[Tensor], owners: Tensor) -> Tensor:
    """[n, ...] of the rows of all ranks, each in the order of the clients."""
    whole = parts[0].new_empty(len(owners), *parts[0].shape[1:])
    for rank, part in enumerate(parts):
        whole[owners == rank] = part
    return whole


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A number for each tensor that changes with any of its bits."""
    found = {}
    for name, value in sorted(tensors.items()):
        flat = value.detach().contiguous().reshape(-1)
        bits = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
        whole = len(bits) // 8 * 8
        found[name] = int(bits[:whole].view(torch.int64).sum()) + int(bits[whole:].sum())
    return found

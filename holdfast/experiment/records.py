"""What an experiment writes to its run directory and reads back: its start, its rounds, its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.core.device import to_device
from holdfast.core.errors import RunError
from holdfast.core.reading import parse_json
from holdfast.core.types import State, Verdict
from holdfast.evaluation import detection, metrics
from holdfast.methods.context import Context
from holdfast.storage.client_state import RowStore
from holdfast.storage.store import PreparedRound

if TYPE_CHECKING:
    from holdfast.experiment.loop import Experiment

_ON_DEVICE = "device/names"
_ATTACK = "attack/"
"""Before what attackers remember, which no part of the server's state has in its name."""


def restore(experiment: Experiment) -> tuple[State, PreparedRound | None]:
    """The server's committed state. For a new run its start, and round 0, which is to be committed too, so
    that a run exists on disk before it trains."""
    head, run_context = experiment.store.head(), experiment.run_context
    if head is None:
        return _begin(experiment)
    run_context.round, saved = head
    experiment.store.committed = run_context.round
    try:
        experiment.participation.restore(saved)
        experiment.privacy.restore(saved)
        run_context.rows = RowStore(experiment.out / "rows", saved["rows/index"])
        state = _at_home(server_state(saved), saved, experiment)
        remembered = {name: value for name, value in saved.items() if name.startswith(_ATTACK)}
        experiment.adversary.memories.tensors = {
            name.removeprefix(_ATTACK): value
            for name, value in _at_home(remembered, saved, experiment).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise RunError(
            f"{experiment.out}: the committed state of round {run_context.round} is damaged ({error})"
        ) from None
    experiment.store.tidy(run_context.round)  # a kill after the last commit may have left the state before it
    return state, None


def server_state(saved: Mapping[str, Tensor]) -> State:
    """The server's part of a committed state."""
    return {
        name.removeprefix("server/"): value for name, value in saved.items() if name.startswith("server/")
    }


def _at_home(state: State, saved: Mapping[str, Tensor], experiment: Experiment) -> State:
    """The server's state with the tensors on the device that were there when it was saved."""
    home = experiment.run_context.home
    if home.type == "cpu" or _ON_DEVICE not in saved:
        return state
    there = set(parse_json(bytes(saved[_ON_DEVICE].tolist())))
    return {name: to_device(value, home) if name in there else value for name, value in state.items()}


def _where(state: State) -> State:
    """Which tensors of the server's state are on a device, as bytes of JSON; nothing where none is."""
    there = sorted(name for name, value in state.items() if value.device.type != "cpu")
    if not there:
        return {}
    return {_ON_DEVICE: torch.frombuffer(bytearray(json.dumps(there).encode()), dtype=torch.uint8)}


def _begin(experiment: Experiment) -> tuple[State, PreparedRound]:
    if experiment.weights is not None:
        experiment.store.write_start(experiment.initial)
    experiment.run_context.round = 0
    experiment.run_context.rows = RowStore(experiment.out / "rows")
    ctx = experiment.context()
    state = experiment.server.init(ctx)
    aggregator = experiment.parts.aggregator.init(ctx.wire.layout(experiment.network.layout))
    state |= {f"aggregator/{k}": v for k, v in aggregator.items()}
    for place, detector in enumerate(experiment.parts.detectors):
        state |= {f"detector{place}/{k}": v for k, v in detector.init().items()}
    return state, _prepare(experiment, state, {"round": 0, "metrics": {}}, {})


def prepare_round(
    experiment: Experiment,
    state: State,
    ctx: Context,
    verdict: Verdict,
    figures: metrics.Figures,
    arrays: Mapping[str, Tensor],
) -> PreparedRound:
    """Collect all of a round. It is written, and counts, only once the caller commits it."""
    meter, round, adversary = experiment.meter, experiment.run_context.round, experiment.adversary
    benign = adversary.benign(verdict.ids, round)
    figures = figures | experiment.method.round_figures(verdict, experiment.federation.facts, benign)
    figures |= experiment.privacy.figures()
    part = {
        "round": round,
        "metrics": {**figures, **meter.figures(), "rejected": len(verdict.rejected)},
        "exchanges": meter.exchanges,
        "seconds": meter.seconds | {f"server/{name}": spent for name, spent in ctx.timer.spent.items()},
        "banned": _by_client(verdict.banned),
        "rejected": _by_client(verdict.rejected),
        "refused": _by_client(meter.refused),
        "notes": list(verdict.notes),
        "fallback": verdict.fallback,
        "diverged": metrics.divergence(figures, meter.answers, set(adversary.at(round).tolist())),
        "attack": adversary.take_notes(),
    }
    tensors = {"cohort": ctx.cohort, "took_part": meter.took_part(), "verdict/ids": verdict.ids, **arrays}
    tensors |= experiment.privacy.arrays()
    tensors |= {f"verdict/scores/{k}": v for k, v in verdict.scores.items()}
    tensors |= {f"verdict/tables/{k}": v for k, v in verdict.tables.items()}
    if verdict.weights is not None:
        tensors["verdict/weights"] = verdict.weights
    if adversary.redraws:
        tensors["malicious"] = adversary.at(round)
    return _prepare(experiment, state, part, tensors)


def _by_client(reasons: Mapping[int, str]) -> dict[str, str]:
    return {str(client): reason for client, reason in reasons.items()}


def _prepare(
    experiment: Experiment, state: State, part: dict[str, Any], arrays: Mapping[str, Tensor]
) -> PreparedRound:
    saved = {f"server/{k}": v for k, v in state.items()} | experiment.participation.state()
    remembered = {f"{_ATTACK}{k}": v for k, v in experiment.adversary.memories.tensors.items()}
    saved |= experiment.privacy.state() | remembered | _where({**state, **remembered})
    last = part["round"] >= experiment.rounds
    return experiment.store.prepare(part["round"], saved, part, arrays, experiment.run_context.rows, last)


def write_result(experiment: Experiment) -> dict[str, Any]:
    """Write the final figures beside the protocol by which they were measured, and return both."""
    if experiment.store.follows:  # the process that writes them returns them
        return {"run_dir": str(experiment.out)}
    config, participation, adversary = experiment.config, experiment.participation, experiment.adversary
    parts = experiment.store.parts(experiment.run_context.round)
    final = metrics.of_run(
        parts,
        config.evaluate.targets,
        adversary.malicious,
        len(participation.clients),
        participation.banned,
        experiment.metrics,
    )
    judged = []
    if len(adversary.malicious):
        judged = [
            detection.JudgedRound.of(
                part, experiment.store.arrays(part["round"]), adversary.at(part["round"])
            )
            for part in parts
        ]
    final |= experiment.privacy.figures()
    final |= detection.of_rounds(judged, decide=adversary.redraws)
    protocol = {
        **config.evaluate.model_dump(mode="json"),
        "models": list(experiment.models),
        "metrics": list(experiment.metrics),
        "deployed": experiment.method.deploys,
    }
    result = {
        "run_dir": str(experiment.out),
        "rounds": experiment.rounds,
        "final": final,
        "protocol": protocol,
    }
    experiment.store.write_json("result.json", result)
    return result

"""How the figures were measured: which model, on which clients, when. Nothing is hidden in the score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.report.charts import swatch
from holdfast.report.markup import Section, fill
from holdfast.report.read_runs import RunRecord, SettingRuns
from holdfast.report.settings_by_attack import SettingsByAttack

_MOST_NAMES = 24  # of settings that share a row


def protocol(lines: Sequence[SettingRuns], by_attack: SettingsByAttack) -> Section:
    """A row for each way of measuring, with the settings that were measured so."""
    alike: dict[tuple[str, ...], list[SettingRuns]] = {}
    for line in lines:
        told = line.records[0].protocol
        words = (_model_words(told), _client_words(told, line.records[0]), _time_words(told, line.records[0]))
        alike.setdefault(words, []).append(line)
    rows = []
    for row, same in alike.items():
        shown = same if len(same) <= _MOST_NAMES else same[: _MOST_NAMES - 1]
        names = [(swatch(by_attack.place(line)), line.label) for line in shown]
        rows.append((names, len(same) - len(shown), row))
    return Section("How it was measured", fill("sections/protocol.html", rows=rows))


def _model_words(told: dict[str, Any]) -> str:
    meaning = {
        "global": "the global model, one for all",
        "personal": "each client's personal model",
        "customised": "the model the server makes for each client",
    }
    kept = {
        "keep_own": "its own last one",
        "deliver": "what it would be sent",
        "finetune": "a copy trained from what it would be sent",
    }
    text = meaning.get(str(told["deployed"]), "unknown: the method is not installed here")
    if told["deployed"] != "personal":
        return text
    trained = (
        "; in the cohort: its model after its own training" if told.get("selected") == "keep_own" else ""
    )
    return f"{text} (a client outside the cohort: {kept[told['unselected']]}{trained})"


def _client_words(told: dict[str, Any], record: RunRecord) -> str:
    groups = {
        "all": "all clients",
        "benign": "benign clients",
        "cohort": "the round's cohort",
        "held-out": "held-out clients",
    }
    who = groups[told["clients"]]
    share = record.config["data"]["split"]["test"]
    on = (
        "the dataset's whole test split"
        if told["test"] == "global"
        else f"each one's own test samples ({100 * share:g} % of its data)"
    )
    return f"{who}, {on}" + (
        "; the mean leaves out malicious ones" if record.config["attack"] is not None else ""
    )


def _time_words(told: dict[str, Any], record: RunRecord) -> str:
    every = "every round" if told["every"] == 1 else f"every {told['every']} rounds and the last"
    last = max((round for round, _ in record.curve("accuracy")), default=0)
    if last == record.rounds:
        return f"{every}; the headline is the last round ({last})"
    if last > record.rounds:  # what a method does at the end counts as one more round
        step = f"the method's last step, which follows round {record.rounds}"
        return f"{every}; the headline is measured after {step}"
    return f"{every}; the headline is round {last} of {record.rounds}, the last so far" if last else every

"""Forecast who will take part in a run, as far as it is known beforehand: from this follow the steps of the
whole run and the number of clients with private rows on disk. Bans and lost replies are not forecast."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.experiment.loop import Experiment
from holdfast.forecast.short_rounds import own_steps


@dataclass(frozen=True)
class ExpectedParticipation:
    """Arrays by round, from the first round on."""

    steps: np.ndarray
    """Steps of the cohort's clients, one model each."""
    live: np.ndarray
    """Clients that have taken part so far."""
    records: np.ndarray
    """Private rows in the file after the round: a new row never overwrites one that the last commit still
    needs."""


def expected_participation(
    experiment: Experiment, rounds: int, everyone: bool = False
) -> ExpectedParticipation:
    """Forecast the participation of every round. With `everyone`, all available clients train, not only the
    cohort."""
    participation, run_context = experiment.participation, experiment.run_context
    own, seen = (
        own_steps(run_context.federation.train.counts, run_context.recipe),
        np.zeros(experiment.federation.clients, dtype=bool),
    )
    constant = participation.availability == 1.0 and (everyone or participation.participation >= 1.0)
    steps, live, records = (np.zeros(rounds) for _ in range(3))
    free = end = 0
    drawn = np.zeros(0, dtype=np.int64)
    for round in range(1, rounds + 1):
        if round == 1 or not constant:
            available = participation.available(round)
            drawn = (available if everyone else participation.cohort(round, available)).numpy()
        replaced = int(seen[drawn].sum())
        seen[drawn] = True
        end += max(0, len(drawn) - free)
        free = max(0, free - len(drawn)) + replaced
        steps[round - 1], live[round - 1], records[round - 1] = own[drawn].sum(), seen.sum(), end
    return ExpectedParticipation(steps, live, records)

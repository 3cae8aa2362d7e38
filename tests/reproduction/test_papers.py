"""Every table and figure that is shipped: it parses, every experiment has a valid config, every printed
number has its cell."""

from __future__ import annotations

import pytest

from holdfast.reproduction.experiments import StudyGrid, StudyRequest
from holdfast.reproduction.measures import measured
from holdfast.reproduction.study import SCALES, VARIANTS, keys, read
from holdfast.reproduction.values import printed, printed_rows


@pytest.mark.parametrize("key", keys())
def test_every_study_plans_at_every_scale(key: str) -> None:
    study = read(key)
    assert study.claims, "a study without a claim decides nothing"
    for scale in SCALES:
        for variant in VARIANTS:
            grid = StudyGrid(study, StudyRequest(scale=scale, variant=variant, stand_ins=True))
            assert grid.to_run()
            if scale == "smoke":
                assert all(cell.config.data.name == "digits" for cell in grid.planned_runs), (
                    "smoke must run where there is no data"
                )
                assert max(cell.config.train.rounds for cell in grid.planned_runs) <= 3
                assert len(grid.to_run()) <= 12
    for metric in study.metrics.values():
        if metric.measure is not None:
            assert measured(metric.measure).__doc__


@pytest.mark.parametrize("key", [key for key in keys() if read(key).printed is not None])
def test_every_printed_number_has_its_cell(key: str) -> None:
    study = read(key)
    grid = StudyGrid(study, StudyRequest(scale="full"))
    found = printed(study, grid.labels)
    request = [
        row
        for row in printed_rows(study.paper)
        if row["table"] == study.printed and row["metric"] not in study.print.omits
    ]
    named = {row["metric"] for row in request}  # differences that only a claim needs are not printed
    templates = " ".join((study.print.dataset, study.print.setting, study.print.method))
    one = {
        axis: labels[0] for axis, labels in grid.labels.items() if f"{{{axis}}}" not in templates
    }  # the print cannot tell these apart
    shown = [
        (name, at) for name, at in found.by_place if all(one.get(axis, label) == label for axis, label in at)
    ]
    cells = {
        (study.metrics[name].printed or name, at) for name, at in shown
    }  # a number may stand beside two of ours
    assert request and sum(name in named for name, _ in cells) == len(request)

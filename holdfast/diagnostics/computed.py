"""Diagnoses that train or test again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from holdfast.diagnostics.fisher import most_informative_replaced
from holdfast.diagnostics.gradcam import picture
from holdfast.diagnostics.importance import by_place, rank_changes, series_of
from holdfast.diagnostics.recorded import name_of_run
from holdfast.report.charts import Series
from holdfast.report.diagnosis import CurvesFigure, Diagnosis, ImageFigure
from holdfast.results.run import Run

COMPUTED = {
    "rank-change": (
        "runs the experiment again: how far benign and poisoned training moves parameters in the order by"
        " importance"
    ),
    "top-fim": (
        "accuracy after the parameters with the most Fisher information (FIM) are replaced by those of a"
        " new network"
    ),
    "grad-cam": "a picture: where the model looks in test images, with the trigger where the attack has one",
}


def rank_change(run: Run, rounds: int | None = None) -> Diagnosis:
    """FedCPA, Fig. 1 and 4."""
    frame = rank_changes(run, rounds)
    means = by_place(frame)
    title = f"rank-change: {name_of_run(run)}"
    note = "Mean over clients and rounds, in per cent of all parameters; bands are one standard deviation."
    across = "place in the order by importance, in per cent (0: the least important)"
    groups = {title: ("benign", "poisoned"), "disparity: poisoned less benign": ("disparity",)}
    figures = [
        CurvesFigure(name, note, [series_of(means, one) for one in wanted if one in means], True, across)
        for name, wanted in groups.items()
        if wanted[0] in means
    ]
    return Diagnosis(title, frame, means.iloc[:: max(1, len(means) // 10)], figures)


def top_fim(run: Run, share: float = 0.05) -> Diagnosis:
    """FedAS, Fig. 3a."""
    frame = most_informative_replaced(run, share)
    bad = run.malicious()
    frame.insert(1, "malicious", frame["client"].isin(bad))
    shown = frame.sort_values(["before", "top"], ascending=False, ignore_index=True)
    percent = f"{100 * share:g} %"
    names = {"before": "as trained", "random": f"{percent} at random", "top": f"top {percent} by FIM"}
    series = [
        Series(words, [(place + 1, v, v, v) for place, v in enumerate(shown[name])])
        for name, words in names.items()
    ]
    title = f"top-fim: {name_of_run(run)}"
    note = (
        f"Test accuracy of each client's model after {percent} of its parameters were replaced by those of a"
        " new network."
    )
    mean = {
        "client": "mean",
        "malicious": "",
        "samples": frame["samples"].sum(),
        **frame[["before", "top", "random"]].mean(),
    }
    short = pd.concat([frame, pd.DataFrame([mean])], ignore_index=True)
    return Diagnosis(
        title, frame, short, [CurvesFigure(title, note, series, True, "clients, the most accurate first")]
    )


def grad_cam(
    runs: Mapping[str, Run], images: Sequence[int], triggered: bool | None = None, client: int | None = None
) -> Diagnosis:
    """FedCPA, Fig. 3. By default, images carry the trigger where there is one."""
    if triggered is None:
        attacks = [
            (run._experiment.adversary.attack, run._experiment.federation.samples) for run in runs.values()
        ]
        triggered = any(
            attack is not None and attack.planted(samples) is not None for attack, samples in attacks
        )
    drawn, frame = picture(runs, images, triggered, client)
    title = "grad-cam: " + ", ".join(runs)
    note = "Red: what supports the predicted class. Blue frame: correct, red frame: wrong."
    note += " The images carry the trigger." if triggered else ""
    return Diagnosis(title, frame, frame, [ImageFigure(title, note, drawn)])

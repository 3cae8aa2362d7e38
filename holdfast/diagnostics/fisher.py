"""Whether the Fisher information finds the parameters that matter (FedAS, Fig. 3a): replace those with the
most of it and test again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.progress import progress
from holdfast.evaluation.evaluate import score
from holdfast.local.fisher import Definition, diagonal
from holdfast.local.plan import Plan
from holdfast.models.network import Network
from holdfast.results.run import Run

_AT_ONCE = 32  # clients whose models and information are in memory together


def most_informative_replaced(
    run: Run,
    share: float = 0.05,
    by: Literal["fresh", "zero"] = "fresh",
    of: Definition = "batch-sum",
    clients: Sequence[int] | None = None,
) -> pd.DataFrame:
    """One row per client: the accuracy of the model it would use (`before`), the accuracy after the share of
    its parameters with the most Fisher information on its training data got the values of a freshly
    initialised network, or 0 (`top`), and after as many parameters drawn at random did (`random`)."""
    if not 0 <= share <= 1:
        raise ConfigError(f"share is a part of the parameters, from 0 to 1, not {share}")
    if by not in ("fresh", "zero"):
        raise ConfigError(f'by is "fresh" or "zero", not {by!r}')
    experiment = run._experiment
    everyone = range(experiment.federation.clients) if clients is None else clients
    frames = []
    with progress("Fisher information", len(everyone)) as advance:
        for start in range(0, len(everyone), _AT_ONCE):
            ids = sorted(everyone[start : start + _AT_ONCE])
            frames.append(_measured(run, ids, share, by, of))
            advance(len(ids))
    return (
        pd.concat(frames, ignore_index=True)
        if frames
        else pd.DataFrame(columns=["client", "samples", "before", "top", "random"])
    )


def _measured(run: Run, ids: list[int], share: float, by: str, of: Definition) -> pd.DataFrame:
    experiment = run._experiment
    run_context, network, samples = (
        experiment.run_context,
        experiment.network,
        experiment.run_context.federation.samples,
    )
    models = torch.stack([run.vector(client) for client in ids])
    who, plan, key = (
        torch.tensor(ids),
        Plan(**run.manifest["plan"]),
        experiment.key.fold("diagnostics", "fisher"),
    )
    fresh = network.initial(key.fold("fresh")) if by == "fresh" else torch.zeros_like(models[0])
    known = diagonal(network, models, samples, run_context.data(who), experiment.run_context.recipe, plan, of)
    luck = key.fold("random").fold(who).uniform(network.layout.size, dtype=torch.float64)
    test = run_context.test(who)
    frame = pd.DataFrame({"client": ids, "samples": test.count.tolist()})
    for column, tried in (
        ("before", models),
        ("top", _replaced(network, models, fresh, known, share)),
        ("random", _replaced(network, models, fresh, luck, share)),
    ):
        found = score(network, experiment.rule.predict, tried, torch.arange(len(ids)), samples, test, plan)
        frame[column] = (
            found.correct.double() / found.total
        ).tolist()  # NaN where there is nothing to test on
    return frame


def _replaced(network: Network, models: Tensor, fresh: Tensor, rank: Tensor, share: float) -> Tensor:
    """The models with those of their trainable parameters replaced that rank highest, in each its own."""
    places = network.layout.trainable.nonzero().flatten()
    most = rank[:, places].topk(round(share * len(places)), dim=1).indices
    chosen = places[most]
    return models.scatter(1, chosen, fresh[chosen])

"""What the smoothed prediction of a finished run certifies: votes of noisy models on test samples, and the
radius of CRFL's theorem for each (diagnostics/certificate.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.progress import progress
from holdfast.data.federation import ClientRows, Samples
from holdfast.diagnostics.certificate import Bounds, Threat, logistic_lipschitz, radius, vote_bounds
from holdfast.experiment.loop import Experiment
from holdfast.local.losses import CrossEntropy
from holdfast.local.optimizers.sgd import Sgd
from holdfast.results.run import Run
from holdfast.wrappers.crfl import CRFL

_AT_ONCE = 1 << 10
"""Test samples in one forward pass."""


@dataclass(frozen=True)
class Certified:
    """Votes on test samples, and how far backdoors of some attackers may go."""

    votes: pd.DataFrame
    """A row for each test sample: label, prediction of the smoothed model, whether that is right, the bounds
    `lower` and `upper`, and `radius/R` for R attackers (NaN: the votes leave the winner open)."""
    attackers: tuple[int, ...]

    @property
    def smoothed(self) -> float:
        """The accuracy of the smoothed prediction, certified or not."""
        return float(self.votes["right"].mean())

    def accuracy(self, radii: Sequence[float] | None = None) -> pd.DataFrame:
        """For each number of attackers and each radius: the share of the samples that are predicted right
        with at least that radius (`certified accuracy`), and the share that has it at all (`certified rate`).
        Without `radii`: ten of them, from 0 to the largest."""
        rows: list[dict[str, Any]] = []
        for many in self.attackers:
            own = self.votes[f"radius/{many}"]
            largest = float(own.max()) if own.notna().any() else 0.0
            chosen = [largest * step / 9 for step in range(10)] if radii is None else radii
            rows += [
                {
                    "attackers": many,
                    "radius": r,
                    "certified accuracy": float(((own >= r) & self.votes["right"]).mean()),
                    "certified rate": float((own >= r).mean()),
                }
                for r in dict.fromkeys(chosen)
            ]
        return pd.DataFrame(rows)


def certify(
    run: Run,
    attackers: Sequence[int] = (1,),
    draws: int = 1000,
    noise: float | None = None,
    alpha: float = 0.001,
    bounds: Bounds = "clopper-pearson",
    attacked: int | None = None,
    scale: float = 1.0,
    poisoned: float = 1.0,
    lipschitz: float | None = None,
    samples: int | None = None,
) -> Certified:
    """Certify the global model of a run of fedavg with the mean under the wrapper crfl, on the test samples.

    draws: models that vote; noise: their standard deviation, by default that of the run. alpha: the
    probability that a sample's bounds are wrong. attacked: the round in which the attackers act, by default
    the last, of which nothing is forgotten later. scale, poisoned: by how much they scale their update, and
    the share of each batch that they poison. lipschitz: L of the theorem; by default that of logistic
    regression on samples as long as the longest of the run. samples: the first so many test samples only. The
    theorem is about a convex loss and learning rates that are not too large for it: whether that is so is
    left to the caller."""
    _positive(draws=draws, alpha=alpha, scale=scale, poisoned=poisoned, lipschitz=lipschitz, noise=noise)
    experiment, wrapper = run._experiment, _wrapper(run)
    run.server_state()  # puts the experiment into its last round
    sigma = wrapper.noise if noise is None else noise
    if not sigma > 0:
        raise ConfigError("noise: a smoothed prediction needs noise; set it above 0, for example to 0.01")
    table = _tested(experiment, samples)
    votes = _votes(run, clean_model(run, wrapper), table, draws, sigma)
    lower, upper = vote_bounds(votes, alpha, bounds)
    predicted = votes.argmax(1)
    frame = pd.DataFrame(
        {
            "sample": table.row.tolist(),
            "label": table.label.tolist(),
            "predicted": predicted.tolist(),
            "right": (predicted == table.label).tolist(),
            "lower": lower.tolist(),
            "upper": upper.tolist(),
        }
    )
    for many in attackers:
        threat = threat_of(run, wrapper, many, attacked, sigma, scale, poisoned, lipschitz)
        frame[f"radius/{many}"] = radius(lower, upper, threat).tolist()
    return Certified(frame, tuple(attackers))


def threat_of(
    run: Run,
    wrapper: CRFL,
    attackers: int,
    attacked: int | None = None,
    noise: float | None = None,
    scale: float = 1.0,
    poisoned: float = 1.0,
    lipschitz: float | None = None,
) -> Threat:
    """The terms of the theorem for the attackers that could do most: those with the most weight times
    steps."""
    experiment, last = run._experiment, run.round
    at = last if attacked is None else attacked
    sigma = wrapper.noise if noise is None else noise
    if not 1 <= at <= last:
        raise ConfigError(f"attacked: the run has the rounds 1 to {last}, not {at}")
    context, train = experiment.run_context, experiment.config.train
    counts = context.federation.train.counts[experiment.participation.clients].double()
    if not 1 <= attackers <= len(counts):
        raise ConfigError(f"attackers: a number from 1 to the run's {len(counts)} clients, not {attackers}")
    even = torch.full_like(counts, 1 / len(counts))
    weights = counts / counts.sum() if experiment.parts.aggregator.weights == "samples" else even
    per_pass = counts // train.batch_size if train.drop_last else (counts / train.batch_size).ceil()
    steps = per_pass * train.local_epochs
    if train.local_steps is not None:
        steps = torch.full_like(counts, float(train.local_steps))
    worst = (weights * steps).argsort(descending=True, stable=True)[:attackers]
    context.round = at
    lr = context.lr()
    context.round = last
    later = [(wrapper.bound(t), sigma if t == last else wrapper.noise) for t in range(at + 1, last + 1)]
    return Threat(
        weights=weights[worst].tolist(),
        steps=steps[worst].tolist(),
        lr=lr,
        lipschitz=_lipschitz(experiment, wrapper.bound(at)) if lipschitz is None else lipschitz,
        scale=scale,
        poisoned=poisoned,
        noise=sigma if at == last else wrapper.noise,
        later=later,
    )


def clean_model(run: Run, wrapper: CRFL) -> Tensor:
    """The global model without the noise of the last round, which is known from the run's seed."""
    experiment, model = run._experiment, run.vector().clone()
    p = experiment.run_context.wire().parameters
    notes = (run.store.part(run.round) or {}).get("notes", ())
    if run.round and not any("the model stays as it was" in note for note in notes):
        model[:p] -= wrapper.noise_of(model[:p], experiment.context().key.fold("aggregator"))
    return model


def _votes(run: Run, model: Tensor, table: ClientRows, draws: int, noise: float) -> Tensor:
    """int64 [samples, classes]: how many of the noisy models choose each class. A model that answers a sample
    with no number at all votes for the first class."""
    experiment = run._experiment
    network, p = experiment.network, experiment.run_context.wire().parameters
    samples: Samples = experiment.federation.samples
    key, votes = (
        experiment.key.fold("certify"),
        torch.zeros(len(table.row), samples.classes, dtype=torch.int64),
    )
    parts = [samples.batch(rows, network.dtype) for rows in table.row.split(_AT_ONCE)]
    with progress("votes", draws) as advance, torch.no_grad():
        for turn in range(draws):
            noisy = model.clone()
            noisy[:p] += noise * key.fold(turn).normal(p, dtype=model.dtype)
            module = network.load(noisy, network.dtype).eval()
            chosen = torch.cat([experiment.rule.predict(module, part, {}).argmax(1) for part in parts])
            votes[torch.arange(len(votes)), chosen] += 1
            advance(1)
    return votes


def _tested(experiment: Experiment, most: int | None) -> ClientRows:
    """The dataset's test split; where it has none, the test samples of all clients."""
    federation = experiment.federation
    table = federation.global_test if len(federation.global_test.row) else federation.test
    rows, labels = table.row[:most], table.label[:most]
    if not len(rows):
        raise ConfigError("samples: the run has no test samples to certify; set data.split.test")
    return ClientRows(rows, labels, torch.tensor([0, len(rows)]))


def _lipschitz(experiment: Experiment, rho: float) -> float:
    """L of logistic regression, on samples as long as the longest that is trained or tested on."""
    slots = [slot for slot in experiment.network.layout.slots if not slot.buffer]
    shapes = [len(slot.shape) for slot in slots]
    if shapes not in ([2], [2, 1]):
        raise ConfigError(
            "lipschitz: it is known for logistic regression only (model mlp with hidden = []), but this"
            f" network has {len(slots)} tensors of parameters; give a Lipschitz constant of its gradient"
        )
    federation, dtype = experiment.federation, experiment.network.dtype
    rows = torch.cat([federation.train.row, federation.test.row]).unique()
    longest = max(
        float(federation.samples.batch(part, dtype).flatten(1).double().norm(dim=1).max())
        for part in rows.split(_AT_ONCE)
    )
    return logistic_lipschitz(math.hypot(longest, 1.0) if shapes == [2, 1] else longest, rho)


def _wrapper(run: Run) -> CRFL:
    """The run's CRFL wrapper; an error where the theorem is not about such a run."""
    experiment, train = run._experiment, run.config.train
    parts = experiment.parts
    rule, around = parts.aggregator.layers()
    named = [one for one in around if isinstance(one, CRFL)]
    wrong = {
        "method": parts.method.name != "fedavg",
        "aggregator": rule.name != "mean" or len(around) != 1 or not named,
        "detectors": bool(parts.detectors),
        "server": parts.server is not None,
        "optimizer": not isinstance(parts.optimizer, Sgd),
        "train.loss": not isinstance(parts.loss, CrossEntropy),
        "train.server_lr": train.server_lr != 1,
        "train.momentum": train.momentum != 0,
        "train.weight_decay": train.weight_decay != 0,
        "train.clip_gradient": train.clip_gradient is not None,
        "train.participation": train.participation != 1 or train.availability != 1.0,
        "train.dropout": train.dropout != 0,
        "privacy": run.config.privacy is not None,
        "model": any(slot.buffer for slot in experiment.network.layout.slots),
    }
    for name, bad in wrong.items():
        if bad:
            raise ConfigError(
                f"{name}: {run.path} cannot be certified; the theorem is about fedavg with plain SGD and all"
                ' clients in every round, with aggregator = { name = "mean", wrap = ["crfl"] }, and a model'
                " without buffers"
            )
    return named[0]


def _positive(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: a number above 0, not {value}")
    for name in ("alpha", "poisoned"):
        if (given[name] or 0) > 1:
            raise ConfigError(f"{name}: a share, at most 1, not {given[name]}")

"""What a client's update says about the labels that it was trained on (DeepSight, Rieger et al., NDSS 2022,
sections IV and V): the choice behind the aggregator `deepsight` and the detector `deepsight`, and its
settings, which both have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.aggregators.clusters import NOISE, by_density, directions_apart, features_apart, together_apart
from holdfast.aggregators.normality import Models
from holdfast.core.device import to_device
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout, Slot
from holdfast.core.keys import Key
from holdfast.core.registry import Part, setting
from holdfast.evaluation.probe import Probe

PAPER = (
    "Rieger et al., DeepSight: Mitigating Backdoor Attacks in Federated Learning Through Deep Model"
    " Inspection, NDSS 2022"
)
_LARGEST = 1e30  # of a division difference: where the global model's share is next to nothing


@dataclass(frozen=True)
class Findings:
    """For each client: how many classes its update is about (threshold exceedings), its cluster (a number of
    its own where it has none), the share of its cluster that looks poisoned, and whether it is accepted."""

    exceedings: Tensor
    cluster: Tensor
    poisoned: Tensor
    accepted: Tensor


class Inspection(Part):
    """Energies of the output layer, answers to made-up inputs and directions, clustered and then judged by
    cluster."""

    samples: int = setting(20_000, "made-up inputs of a division difference; 0: leave these out", ge=0)
    seeds: int = setting(3, "how often division differences are measured, each on inputs of its own", ge=1)
    tau: float = setting(
        1 / 3, "a cluster is rejected when this share of it, or more, looks poisoned", gt=0, le=1
    )

    def inspect(self, models: Models, probe: Probe | None, key: Key, who: str) -> Findings:
        """Energies, threshold exceedings, three clusterings and the final one. `who` is named in errors."""
        matrix, bias = output_layer(models.layout, who)
        energies = normalised_energies(models, matrix, bias)
        exceedings = threshold_exceedings(energies)
        span = slice((bias or matrix).start, (bias or matrix).stop)
        centre = None if models.to_change is None else -models.to_change[span]
        ids = models.ids
        views = [
            together_apart(by_density(directions_apart(models.rows[:, span], centre), ids, 2)),
            together_apart(by_density(features_apart(energies), ids, 2)),
        ]
        if probe is not None and self.samples:
            views.append(self._by_answers(models, probe, key))
        cluster = by_density(torch.stack(views).mean(dim=0), ids, 2)
        alone = cluster == NOISE
        cluster[alone] = cluster.max() + 1 + torch.arange(int(alone.sum()))
        suspicious = exceedings <= exceedings.double().quantile(0.5) / 2
        share = torch.stack([suspicious[cluster == own].double().mean() for own in cluster])
        return Findings(exceedings, cluster, share, share < self.tau)

    def _by_answers(self, models: Models, probe: Probe, key: Key) -> Tensor:
        """[n, n]: how apart clients are in the clusterings of their division differences, in the mean over
        the seeds."""
        found = []
        for seed in range(self.seeds):
            differences = division_differences(models, probe, self.samples, key.fold("inputs", seed))
            found.append(together_apart(by_density(features_apart(differences), models.ids, 2, neighbours=2)))
        return torch.stack(found).mean(dim=0)


def output_layer(layout: Layout, who: str) -> tuple[Slot, Slot | None]:
    """The last matrix of the head and its bias, among what travels; of a network without a known head those
    of the whole network, and where there is no matrix at all, the last tensor."""
    own = [slot for slot in layout.slots if not slot.buffer]
    if layout.head:
        own = [slot for slot in own if slot.name.startswith(f"{layout.head}.")]
        if not own:
            raise ConfigError(
                f"{who}: the output layer does not travel in this method, and deepsight looks at its update;"
                " choose a method in which the head travels, or another defence"
            )
    matrix = next((slot for slot in reversed(own) if len(slot.shape) > 1), own[-1])
    module = matrix.name.rpartition(".")[0]
    bias = [s for s in own if s.name == f"{module}.bias" and s.shape == matrix.shape[:1] and s is not matrix]
    return matrix, bias[0] if bias else None


def normalised_energies(models: Models, matrix: Slot, bias: Slot | None) -> Tensor:
    """[n, classes] in float64 (NEUPs): the squared energy of each class's output, as a share of all. The
    energy of an output is the sum of its weights' changes, without their signs, and that of its bias."""

    def changes(slot: Slot) -> Tensor:
        rows = models.rows[:, slot.start : slot.stop].double()
        return rows if models.to_change is None else rows + models.to_change[slot.start : slot.stop].double()

    energy = changes(matrix).abs().reshape(len(models.rows), matrix.shape[0], -1).sum(dim=-1)
    if bias is not None:
        energy = energy + changes(bias).abs()
    most = energy.amax(dim=1, keepdim=True)
    squares = torch.where(most > 0, energy / most, 1.0).square()  # no change at all is about every class
    return squares / squares.sum(dim=1, keepdim=True)


def threshold_exceedings(energies: Tensor) -> Tensor:
    """int64[n] on the host: the number of classes whose energy reaches max(1 %, 1 / classes) of the
    largest."""
    classes = energies.shape[1]
    bound = max(0.01, 1 / classes) * energies.amax(dim=1, keepdim=True)
    return (energies >= bound).sum(dim=1).cpu()


def division_differences(models: Models, probe: Probe, samples: int, key: Key) -> Tensor:
    """[n, classes] in float64 (DDifs): the share that a client's model gives to a class divided by the share
    that the global model gives to it, in the mean over made-up inputs. It holds one model and a few inputs
    with their answers at a time."""
    total: Tensor | None = None
    for x in probe.inputs(key, samples):
        base = probe.log_shares(models.reference, None, x).clamp_(min=-69.0)  # 1e-30
        found = []
        for row in range(len(models.rows)):
            model = models.rows[row] if models.to_model is None else models.rows[row] + models.to_model
            ratios = (probe.log_shares(model, row, x) - base).exp_()
            found.append(ratios.nan_to_num_(nan=_LARGEST, posinf=_LARGEST).clamp_(max=_LARGEST).sum(dim=0))
        sums = torch.stack(found)
        total = sums if total is None else total + sums
    assert total is not None
    return to_device(total / samples, models.rows.device)

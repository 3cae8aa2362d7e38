"""FLDetector: clients whose updates do not follow from their last ones are malicious (Zhang et al., KDD 2022,
Algorithms 1 to 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from holdfast.aggregators.clusters import number_of_clusters, two_means
from holdfast.aggregators.geometry import blocks
from holdfast.core.device import to_device
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.detectors.patience import in_a_row
from holdfast.detectors.quasi_newton import changes_of_update
from holdfast.detectors.selecting import Choice, Selecting

PAPER = (
    "Zhang et al., FLDetector: Defending Federated Learning Against Model Poisoning Attacks via Detecting"
    " Malicious Clients, KDD 2022"
)


@dataclass(frozen=True)
class History:
    """What the server remembers: the last global models [k, d], the latest last; the last update of each
    client that it has seen lately [m, d], the round of it, and the client's distances in the last rounds [m,
    window], NaN where it has none; and how many rounds there were, how many of them had distances, and in how
    many clients were banned."""

    models: Tensor
    clients: Tensor
    updates: Tensor
    when: Tensor
    distances: Tensor
    counts: Tensor

    @staticmethod
    def of(state: State, models: Tensor, window: int) -> History:
        """The memory; an empty one in the first round, and where another part of the model travels now."""
        if "models" in state and state["models"].shape[1] == models.shape[1]:
            held = {name: state[name] for name in History.__dataclass_fields__}
            vectors = {name: to_device(held[name], models.device) for name in ("models", "updates")}
            return History(**{**held, **vectors})
        none, nobody = models[:0].clone(), torch.zeros(0, dtype=torch.int64)
        distances = torch.zeros(0, window, dtype=torch.float64)
        return History(none, nobody, none, nobody, distances, torch.zeros(3, dtype=torch.int64))


@register("detector", "fldetector", paper=PAPER)
class FLDetector(Selecting):
    """Bans the clients whose updates are farthest from what their last updates and the model's last moves
    predict, once such clients stand out.

    The prediction is g' = g_last + B (w - w_last), with the Hessian B of L-BFGS over the last `window` moves
    of the global model. A client's distance is |g' - g|, as a share of all clients' distances; its score the
    mean of the last `window` of these. Once there are distances of `window` rounds, the gap statistic asks in
    every round whether the scores form more than one cluster (with few clients, chance alone makes some), and
    if so, k-means with two clusters gives those to ban. The paper then starts the training again without
    these clients, which is left to the user, and looks no further, as here unless `again`. Attackers that
    send nearly the same in every round are more consistent than honest clients. The move of a round counts as
    its update, so a server optimiser blurs the prediction. A client that was absent is predicted from its
    last update, if the window reaches back that far.

    Memory: `window` + 2 models and the last update of every client of the last `window` + 1 rounds, which is
    one more copy of the updates where all take part in every round; it is saved with the run."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "suspicious": "updates that do not follow from the client's last one (L-BFGS), once they stand out",
        "scores": "`inconsistency`: mean share of the distances to the predictions",
        "keeps, asks": "the last update of each client and `window` + 2 models",
        "settings": "`window`; `again`; `most`, `references` of the gap statistic",
        "from": "Zhang et al. 2022",
    }
    action: Literal["reject", "ban"] = setting("ban", "ban malicious clients, or leave them out of the round")
    patience: int = setting(1, "ban: after so many suspicious rounds of a client in a row", ge=1)
    window: int = setting(10, "rounds of models, updates and distances that are remembered (N)", ge=1)
    most: int = setting(7, "largest number of clusters that the gap statistic tries", ge=2)
    again: bool = setting(
        False, "ban: go on looking after the first ban; the paper's server looks no further"
    )
    references: int = setting(10, "sets of uniform numbers that the gap statistic compares with", ge=2)

    def choose(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Choice:
        reference = ctx.reference.to(models)
        past = History.of(state, models, self.window)
        globals_ = torch.cat([past.models, reference[None]])[-(self.window + 2) :]
        found = _inconsistency(past, globals_, models, reference, ids)
        now, scores = self._remembered(past, globals_, models, reference, ids, found)
        known = ~scores.isnan()
        malicious, telling = torch.zeros(len(ids), dtype=torch.bool), False
        done = self.action == "ban" and not self.again and bool(past.counts[2])
        if int(now.counts[1]) >= self.window and int(known.sum()) > 2 and not done:
            telling, mine = True, ids[known]
            if number_of_clusters(scores[known], mine, self.most, self.references) > 1:
                malicious[known] = two_means(scores[known], mine, ctx.key.fold("two means"))
                now.counts[2] += bool((malicious & (in_a_row(state, ids) + 1 >= self.patience)).any())
        return Choice(
            malicious,
            lambda row: (
                f"inconsistency {scores[row]:.3g}, against {scores[known].median():.3g} of the median client"
            ),
            {"inconsistency": scores},
            dict(vars(now)),
            telling,
        )

    def _remembered(
        self, past: History, globals_: Tensor, models: Tensor, reference: Tensor, ids: Tensor, found: Tensor
    ) -> tuple[History, Tensor]:
        """The memory with this round added, and the scores of this round's clients. Clients that the window
        no longer reaches are forgotten."""
        turn = int(past.counts[0])
        staying = (past.when >= turn - self.window) & ~torch.isin(past.clients, ids)
        everyone = torch.cat([past.clients[staying], ids])
        order = everyone.argsort()
        updates = models - reference
        if bool(staying.any()):
            updates = torch.cat([past.updates[to_device(staying, models.device)], updates])
        if not bool((order[1:] > order[:-1]).all()):
            updates = updates[to_device(order, models.device)]
        before = torch.full((len(everyone), self.window), torch.nan, dtype=torch.float64)
        old = torch.isin(everyone, past.clients)
        before[old] = past.distances[torch.searchsorted(past.clients, everyone[old])]
        mine = torch.arange(len(everyone)) >= int(staying.sum())
        said = bool((~found.isnan()).any())
        if said:
            before = torch.cat([before[:, 1:], torch.full_like(before[:, :1], torch.nan)], dim=1)
            before[mine, -1] = found
        when = torch.cat([past.when[staying], torch.full_like(ids, turn)])
        counts = past.counts + torch.tensor([1, int(said), 0])
        scores = before[mine].nanmean(dim=1)
        return History(globals_, everyone[order], updates, when[order], before[order], counts), scores


def _inconsistency(past: History, globals_: Tensor, models: Tensor, reference: Tensor, ids: Tensor) -> Tensor:
    """[n] in float64: the distance of each client's update to the predicted one, as a share of all; NaN for a
    client without an update that the window reaches, and for all while there is no pair for L-BFGS."""
    found = torch.full((len(ids),), torch.nan, dtype=torch.float64)
    moves = len(globals_) - 1
    place = torch.searchsorted(past.clients, ids).clamp(max=max(0, len(past.clients) - 1))
    if moves < 2 or not len(past.clients):
        return found
    known = past.clients[place] == ids
    ago = int(past.counts[0]) - past.when[place]  # 1: in the round before
    rows = (known & (ago <= moves)).nonzero().flatten()
    if not len(rows):
        return found
    steps = globals_[1:] - globals_[:-1]
    change = to_device(changes_of_update(steps)[moves - ago[rows]], models.device)
    there, last = to_device(rows, models.device), to_device(place[rows], models.device)
    squares = torch.zeros(len(rows), dtype=torch.float64, device=models.device)
    for columns in blocks(models):
        apart = change @ steps[:, columns].double()
        apart += past.updates[last, columns].double() - models[there, columns].double()
        apart += reference[columns].double()
        squares += apart.square_().sum(dim=1)
    distances = squares.sqrt_().cpu()
    found[rows] = (distances / distances.sum()).nan_to_num(nan=0.0)
    return found

"""What attacks on training data have in common: choosing a share of the attackers' samples, and scratch rows
for changed inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from holdfast.attacks.base import Trigger
from holdfast.attacks.triggered import Triggered, shown
from holdfast.core.keys import Key
from holdfast.data.client_rows import ClientRows
from holdfast.data.federation import Federation, Samples


def chosen(table: ClientRows, malicious: Tensor, ratio: float, key: Key) -> Tensor:
    """Places in the table: of each attacker's samples a share, rounded to the nearest number, drawn by its
    own key."""
    places = []
    for client in malicious.tolist():
        begin, end = int(table.start[client]), int(table.start[client + 1])
        order = torch.argsort(key.fold("chosen", client).hash(end - begin), stable=True)
        places.append(begin + order[: int(ratio * (end - begin) + 0.5)].sort().values)
    return torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)


def with_inputs(
    federation: Federation, places: Tensor, change: Callable[[Tensor], Tensor], label: Tensor | None = None
) -> Federation:
    """The training samples at these places changed, and relabelled where labels are given; the store keeps
    its own rows."""
    table, samples = federation.train, federation.samples
    labels = table.label[places] if label is None else label
    more, where = append(samples, change(samples.x[table.row[places]]), labels)
    row, new = table.row.clone(), table.label.clone()
    row[places], new[places] = where, labels
    return replace(federation, samples=more, train=replace(table, row=row, label=new))


def with_labels(federation: Federation, places: Tensor, label: Tensor) -> Federation:
    """The training samples at these places relabelled."""
    new = federation.train.label.clone()
    new[places] = label
    return replace(federation, train=replace(federation.train, label=new))


def owner_keys(table: ClientRows, places: Tensor, key: Key) -> Key:
    """A key for each place, of its owner and its number among the owner's samples: other attackers do not
    change it."""
    owner = owners(table)[places]
    return key.fold(owner).fold(places - table.start[owner])


def append(samples: Samples, x: Tensor, y: Tensor) -> tuple[Samples, Tensor]:
    """The store with scratch rows behind its own, and where they lie."""
    user = None if samples.user is None else torch.cat([samples.user, samples.user.new_full((len(x),), -1)])
    where = len(samples) + torch.arange(len(x))
    return replace(samples, x=torch.cat([samples.x, x]), y=torch.cat([samples.y, y]), user=user), where


def with_trigger(federation: Federation, test: ClientRows, trigger: Trigger) -> tuple[Federation, Triggered]:
    """The federation with triggered copies of test samples behind its own, and the tables of them."""
    samples = federation.samples
    table, of_target = shown(test, trigger.target, trigger.inclusive, trigger.among)
    rows = table.row.unique()
    more, where = append(samples, trigger.stamp(samples.x[rows]), torch.full_like(rows, trigger.target))
    found = [
        None if each is None else replace(each, row=where[torch.searchsorted(rows, each.row)])
        for each in (table, of_target)
    ]
    assert found[0] is not None
    return replace(federation, samples=more), Triggered(found[0], found[1])


def owners(table: ClientRows) -> Tensor:
    """The owner of each entry of a table."""
    return torch.repeat_interleave(torch.arange(table.clients), table.counts)

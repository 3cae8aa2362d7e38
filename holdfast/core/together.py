"""Computations that several experiments ask for at the same time, answered as one.

A server half yields a `Computation` as it yields an exchange. On a GPU, those of experiments at the same
point of a round that are alike are computed as one operation with a leading axis for the experiments: the
host starts a few large kernels in place of many small ones. On a CPU each is computed alone."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.core.generators import Finished, advance


class Computation:
    """Something to be computed, with all that it needs."""

    seconds: float = 0.0
    """How long it took; of computations that were made together, each one's share."""

    def alone(self) -> Any:
        """Compute this one."""
        raise TypeError(f"{type(self).__name__} does not define what it computes")

    def alike(self) -> Hashable | None:
        """Computations with equal keys can be computed together; None: this one only alone."""
        return None

    def together(self, others: Sequence[Any]) -> list[Any] | None:
        """Compute this one and others that are alike, in this order; None where that cannot be done."""
        return None

    def on_device(self) -> bool:
        """Whether its numbers are on a device other than the CPU."""
        return False


Each = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""Maps a function over items, in their order: `engine/host_threads.each`, or a plain loop."""


def one_by_one(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [work(item) for item in items]


def answered(
    computations: Sequence[Computation], each: Each = one_by_one, batch: bool | None = None
) -> list[Any]:
    """The answer to each computation: a result, or the error that it ended with. `each` maps a function over
    the computations that are computed alone; `batch` says whether any are computed together, by default those
    on a device."""
    groups: dict[Hashable, list[int]] = {}
    for place, computation in enumerate(computations):
        wanted = computation.on_device() if batch is None else batch
        key = computation.alike() if wanted else None
        groups.setdefault(place if key is None else (type(computation), key), []).append(place)
    answers: dict[int, Any] = {}
    left: list[int] = []
    failed: list[tuple[list[int], Exception]] = []
    for places in groups.values():
        found = _together([computations[place] for place in places]) if len(places) > 1 else None
        if isinstance(found, list):
            answers.update(zip(places, found, strict=True))
            continue
        left += places
        if found is not None:
            failed.append((places, found))
    answers.update(zip(left, each(_attempt, [computations[place] for place in left]), strict=True))
    for places, error in failed:
        if not any(isinstance(answers[place], Exception) for place in places):
            name = type(computations[places[0]]).__name__
            warnings.warn(
                f"{len(places)} experiments are computed one by one, because their {name} together failed:"
                f" {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return [answers[place] for place in range(len(computations))]


def computed_alone(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """The same generator, whose computations are each computed alone; other requests are passed on."""
    request = advance(steps)
    while not isinstance(request, Finished):
        if isinstance(request, Computation):
            reply = _attempt(request)
            if isinstance(reply, Exception):
                raise reply
        else:
            reply = yield request
        request = advance(steps, reply)
    return request.value


def alone(steps: Generator[Any, Any, Any]) -> Any:
    """Run a generator of computations to its end, each computed alone. Returns what it returns."""
    return advance(computed_alone(steps)).value


def in_lockstep(
    several: Sequence[Generator[Any, Any, Any]], each: Each = one_by_one, batch: bool | None = None
) -> list[Any]:
    """Run generators of computations to their ends, those at the same point together. Returns what each of
    them returns; the first error is raised once all have ended."""
    ended: dict[int, Any] = {}

    def turn(item: tuple[int, Any]) -> tuple[int, Any]:
        place, reply = item
        try:
            if isinstance(reply, Exception):
                raise reply
            return place, advance(several[place], reply)
        except Exception as error:
            return place, Finished(error)

    moved = each(turn, [(place, None) for place in range(len(several))])
    while moved:
        ended |= {place: request.value for place, request in moved if isinstance(request, Finished)}
        waiting = {place: request for place, request in moved if not isinstance(request, Finished)}
        replies = answered(list(waiting.values()), each, batch)
        moved = each(turn, list(zip(waiting, replies, strict=True)))
    for place in range(len(several)):
        if isinstance(ended[place], Exception):
            raise ended[place]
    return [ended[place] for place in range(len(several))]


def _together(computations: list[Computation]) -> list[Any] | Exception | None:
    """The results of computations that are alike; None, or an error, where they have to be computed one by
    one, so that only the experiment at fault stops."""
    began = time.perf_counter()
    try:
        found = computations[0].together(computations[1:])
    except Exception as error:
        return error
    for computation in computations:
        _note(computation, (time.perf_counter() - began) / len(computations))
    return found


def _attempt(computation: Computation) -> Any:
    began = time.perf_counter()
    try:
        return computation.alone()
    except Exception as error:
        return error
    finally:
        _note(computation, time.perf_counter() - began)


def _note(computation: Computation, seconds: float) -> None:
    object.__setattr__(computation, "seconds", seconds)  # computations are frozen otherwise


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """The parts [n, ...] as one tensor [c, n, ...]. Parts that lie one after the other in the same memory, as
    what the clients of fused experiments send does, are not copied; so the result must not be written to."""
    first = parts[0]
    size = first.numel()
    adjacent = all(
        part.shape == first.shape
        and part.dtype == first.dtype
        and part.is_contiguous()
        and part.untyped_storage()._cdata == first.untyped_storage()._cdata
        and part.storage_offset() == first.storage_offset() + place * size
        for place, part in enumerate(parts)
    )
    if adjacent:
        return first.as_strided((len(parts), *first.shape), (size, *first.stride()))
    return torch.stack(list(parts))

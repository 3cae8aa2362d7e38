"""Any optimiser of torch.optim that treats every number for itself: it then does the same to a stack of
clients as to each client alone. Whether that is so is tried once, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import create_model
from torch import Tensor

from holdfast.core.errors import ConfigError, suggest
from holdfast.core.registry import INVALID, explain, setting
from holdfast.local.function_identity import identity
from holdfast.local.optimizers.base import Optimizer

if TYPE_CHECKING:
    from holdfast.local.update import Update

PREFIX = "torch:"
_OURS = frozenset({"lr", "params", "foreach", "maximize", "capturable", "differentiable", "fused"})
_SHAPES = ((3, 4), (5,), (2, 3, 2), ())
_ROWS, _STEPS = 3, 6
_tried: dict[Any, str | None] = {}


class TorchOptimizer(Optimizer):
    """A class of torch.optim, with that class's settings. It keeps its own state, so all rows of a stack have
    one learning rate, and a state cannot be kept from round to round."""

    by_row: ClassVar[bool] = False
    instead = {"momentum": "optimizer.momentum", "weight_decay": "optimizer.weight_decay"}
    of: ClassVar[type[torch.optim.Optimizer]]

    def held(self) -> int:
        return 3  # two in most classes, three in some

    def made(self, params: list[Tensor], lr: float) -> torch.optim.Optimizer:
        given = {name: value for name, value in self.settings().items() if name != "persist"}
        tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        make: Any = self.of
        made: torch.optim.Optimizer = make(params, lr=lr, **tuples)
        return made

    def move(self, update: Update, params: list[Tensor], grads: list[Tensor]) -> None:
        if isinstance(update.lr, Tensor):
            raise ConfigError(f"optimizer '{self.name}' has one learning rate for all rows of a stack")
        before = None if update.masks is None else [param.clone() for param in params]
        self._step(update.live, params, grads, update.lr)
        if before is not None and update.masks is not None:
            for param, old, mask in zip(params, before, update.masks, strict=True):
                param.copy_(torch.where(mask, param, old))

    def _step(self, live: dict[str, Any], params: list[Tensor], grads: list[Tensor], lr: float) -> None:
        """Step the rows that still train. They are the first ones: when some finish, an optimiser of fewer
        rows takes over their part of the state."""
        shapes = [param.shape for param in params]
        if live.get("shapes") != shapes:
            leaves = [param.detach().requires_grad_() for param in params]
            fresh, old = self.made(leaves, lr), live.get("optimizer")
            if old is not None:
                for leaf, was in zip(leaves, old.param_groups[0]["params"], strict=True):
                    fresh.state[leaf] = {
                        name: value[: len(leaf)] if _has_rows(value, was) else value
                        for name, value in old.state[was].items()
                    }
            live |= {"optimizer": fresh, "shapes": shapes}
        optimizer = live["optimizer"]
        (group,) = optimizer.param_groups
        group["lr"] = lr
        for leaf, grad in zip(group["params"], grads, strict=True):
            leaf.grad = grad
        with torch.enable_grad():
            optimizer.step()


def _has_rows(value: Any, like: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == like.shape


def torch_name(chosen: Any) -> str | None:
    """Return the class of torch.optim that a config means, as `torch:NAdam`; None where it means none."""
    if isinstance(chosen, type) and chosen in classes().values():
        return f"{PREFIX}{chosen.__qualname__}"
    if isinstance(chosen, str) and chosen.startswith((PREFIX, "torch.optim.")):
        name = chosen.removeprefix(PREFIX).removeprefix("torch.optim.")
        return PREFIX + {one.lower(): one for one in classes()}.get(name.lower(), name)
    return None


def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimisers of this version of PyTorch, by name."""
    return {
        name: found
        for name, found in vars(torch.optim).items()
        if isinstance(found, type)
        and issubclass(found, torch.optim.Optimizer)
        and found is not torch.optim.Optimizer
    }


def torch_part(chosen: Any) -> type[TorchOptimizer]:
    """Return a class of torch.optim, or one's own subclass of torch.optim.Optimizer, as a kind of part."""
    name = torch_name(chosen)
    if name is not None:
        found = classes().get(name.removeprefix(PREFIX))
        if found is None:
            known = [f"{PREFIX}{one}" for one in classes()]
            raise ConfigError(
                f"optimizer: torch.optim has no '{name.removeprefix(PREFIX)}'{suggest(name, known)}"
            )
    elif isinstance(chosen, type) and issubclass(chosen, torch.optim.Optimizer):
        found, name = chosen, chosen.__name__
    else:
        raise ConfigError("optimizer: give a name, or a class of torch.optim, not an object of one")
    kind: type[TorchOptimizer] = _part_of(found, name)  # type: ignore[arg-type]
    return kind


def torch_optimizer(chosen: Any, settings: Mapping[str, Any]) -> TorchOptimizer:
    """Return such a class with its settings. It is refused where it cannot be stacked."""
    kind = torch_part(chosen)
    try:
        part = kind(**settings)
    except INVALID as error:
        raise ConfigError(explain(error, kind, "optimizer")) from None
    why = _stackable(part)
    if why is not None:
        raise ConfigError(
            f"optimizer: {kind.name} cannot train a stack of clients ({why}); choose sgd, adam, adamw,"
            " rmsprop or another class of torch.optim"
        )
    return part


@cache
def _part_of(found: type[torch.optim.Optimizer], name: str) -> type[TorchOptimizer]:
    """Return a part whose settings are the arguments of the class, with their defaults."""
    arguments = inspect.signature(found.__init__).parameters.values()
    fields: dict[str, Any] = {
        p.name: (
            Any,
            setting(... if p.default is p.empty else p.default, f"see torch.optim.{found.__name__}"),
        )
        for p in list(arguments)[1:]
        if p.name not in _OURS and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    made = create_model(found.__name__, __base__=TorchOptimizer, **fields)
    made.kind, made.name, made.of = "optimizer", name, found
    made.__doc__ = (
        f"{found.__module__.partition('.')[0]}'s {found.__qualname__}, with the arguments of the class."
    )
    return made


def _stackable(part: TorchOptimizer) -> str | None:
    """Return why an optimiser cannot be stacked; None where it can. It is tried once for each choice of
    settings."""
    what = type(part), identity(part)
    if what not in _tried:
        try:
            _tried[what] = (
                None if _equal_rows(part) else "its step on a stack differs from its steps on each row"
            )
        except Exception as error:  # it may need a closure, matrices or sparse gradients
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            _tried[what] = f"a step fails: {reason[:200]}"
    return _tried[what]


def _equal_rows(part: TorchOptimizer) -> bool:
    """Step a stack of different rows, of which one finishes early, and each row alone."""
    luck = torch.Generator().manual_seed(0)
    start = [torch.randn(_ROWS, *shape, generator=luck, dtype=torch.float64) for shape in _SHAPES]
    scale = torch.tensor([0.1, 1.0, 30.0], dtype=torch.float64)
    grads = [
        [
            torch.randn(_ROWS, *shape, generator=luck, dtype=torch.float64)
            * scale.view(-1, *[1] * len(shape))
            for shape in _SHAPES
        ]
        for _ in range(_STEPS)
    ]
    together, alone = [param.clone() for param in start], [param.clone() for param in start]
    live: dict[str, Any] = {}
    own: list[dict[str, Any]] = [{} for _ in range(_ROWS)]
    for t, gradient in enumerate(grads):
        m, lr = _ROWS - (t >= _STEPS // 2), 0.05 / (1 + t)
        part._step(live, [param[:m] for param in together], [grad[:m].clone() for grad in gradient], lr)
        for row in range(m):
            part._step(own[row], [p[row] for p in alone], [grad[row].clone() for grad in gradient], lr)
    moved = any(not torch.equal(a, b) for a, b in zip(together, start, strict=True))
    return moved and all(
        torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(together, alone, strict=True)
    )

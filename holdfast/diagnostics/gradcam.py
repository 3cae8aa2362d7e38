"""Where a network looks: Grad-CAM (Selvaraju et al., ICCV 2017), as FedCPA shows it of backdoored and
defended models (Fig. 3).

The last convolution's channels are weighted by the mean gradient of a class's output with respect to them;
where their weighted sum is positive, the image speaks for the class. A backdoored model looks at the trigger,
a defended one at the object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from holdfast.attacks.triggers.base import changed
from holdfast.core.errors import ConfigError
from holdfast.data.federation import ClientRows, Federation, Samples
from holdfast.report.axis import shorten
from holdfast.report.diagnosis import write_image
from holdfast.results.run import Run

_SIDE, _GAP, _HEAD, _FRAME = 128, 10, 22, 4  # pixels
_RIGHT, _WRONG, _INK = (
    (31, 95, 191),
    (200, 40, 40),
    (27, 31, 36),
)  # the paper's frames: blue for success, red for failure


def grad_cam(
    module: nn.Module, images: Tensor, classes: Tensor | None = None, layer: str | None = None
) -> tuple[Tensor, Tensor]:
    """Heat maps [n, H, W] in [0, 1] for images [n, C, H, W] as the network reads them, and the classes they
    are about: those given, else those predicted. `layer` names a convolution; by default the last one."""
    convolution = _convolution(module, layer)
    caught: list[Tensor] = []

    def catch(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        caught.append(output)
        return output.clone()  # what follows may write in place, as nn.ReLU(inplace=True) does

    handle = convolution.register_forward_hook(catch)
    was_training = module.training
    try:
        module.eval()
        with torch.enable_grad():
            frozen = not any(p.requires_grad for p in module.parameters())
            logits = module(images.detach().requires_grad_() if frozen else images)
            about = logits.argmax(dim=1) if classes is None else classes
            seen = caught[-1]
            slopes = torch.autograd.grad(logits.gather(1, about[:, None]).sum(), seen)[0]
    finally:
        handle.remove()
        module.train(was_training)
    heat = (slopes.mean(dim=(2, 3), keepdim=True) * seen).sum(dim=1).clamp(min=0).detach()
    heat = nn.functional.interpolate(
        heat[:, None], size=images.shape[2:], mode="bilinear", align_corners=False
    )[:, 0]
    most = heat.amax(dim=(1, 2), keepdim=True)
    return torch.where(most > 0, heat / most, 0.0), about


def _convolution(module: nn.Module, layer: str | None) -> nn.Module:
    found = {name: one for name, one in module.named_modules() if isinstance(one, nn.Conv2d)}
    if not found:
        raise ConfigError(
            "model: Grad-CAM needs a network with a convolution; choose one that has, for example lenet"
        )
    if layer is not None and layer not in found:
        raise ConfigError(f"layer: the network has no convolution '{layer}'; it has {', '.join(found)}")
    return found[layer or list(found)[-1]]


def write_picture(
    runs: Mapping[str, Run], images: Sequence[int], path: str | Path, **options: Any
) -> pd.DataFrame:
    """The picture of `picture` as a PNG; returns what every model predicted."""
    drawn, told = picture(runs, images, **options)
    write_image(drawn, Path(path))
    return told


def picture(
    runs: Mapping[str, Run],
    images: Sequence[int],
    triggered: bool = True,
    client: int | None = None,
    layer: str | None = None,
) -> tuple[Image.Image, pd.DataFrame]:
    """A picture with a row for each test image (by its place in the test set) and a column for the image and
    for each run's model, with the heat map of what it predicts laid over it; a blue frame: it is right, a red
    one: it is not.

    `triggered`: the images carry the trigger of the attack in the runs. `client`: the models that this client
    would use; by default the global ones. Beside it, what every model predicted."""
    if not runs or not len(images):
        raise ConfigError("images: name at least one run and one test image")
    shown, labels = _images(runs, images, triggered)
    rows, tiles = [], [[_pixels(shown, place)] for place in range(len(images))]
    frames: list[list[tuple[int, int, int]]] = [[] for _ in images]
    for name, run in runs.items():
        module = run.model(client)
        dtype = next(module.parameters()).dtype
        heat, predicted = grad_cam(module, shown.batch(torch.arange(len(shown)), dtype), layer=layer)
        for place, (index, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            tiles[place].append(_overlaid(tiles[place][0], heat[place].cpu().numpy()))
            frames[place].append(_RIGHT if int(predicted[place]) == label else _WRONG)
            rows.append({"image": index, "model": name, "label": label, "predicted": int(predicted[place])})
    return _sheet(tiles, frames, ["image", *runs]), pd.DataFrame(rows)


def heat_on_trigger(run: Run, images: Sequence[int], layer: str | None = None) -> pd.DataFrame:
    """For each of these test images with the attack's trigger on it: the share of the heat that lies on the
    trigger (NaN: no heat), the true label, what the global model predicts and the trigger's target. `area` is
    the share of the image that the trigger takes."""
    shown, labels = _images({"": run}, images, triggered=True)
    attack = run._experiment.adversary.attack
    trigger = None if attack is None else attack.planted(shown)
    assert trigger is not None  # else there were no such images
    mask = changed(trigger.stamp, shown)
    module = run.model()
    heat, predicted = grad_cam(
        module, shown.batch(torch.arange(len(shown)), next(module.parameters()).dtype), layer=layer
    )
    share = heat[:, mask].sum(dim=1) / heat.sum(dim=(1, 2))
    about = {
        "image": list(images),
        "label": labels.tolist(),
        "predicted": predicted.tolist(),
        "share": share.tolist(),
    }
    return pd.DataFrame({**about, "target": trigger.target, "area": float(mask.double().mean())})


def carriers(run: Run, many: int) -> list[int]:
    """The first test images, by their place, to which the attack's trigger adds something: those of other
    classes than its target."""
    attack, federation = run._experiment.adversary.attack, run._experiment.federation
    trigger = None if attack is None else attack.planted(federation.samples)
    if trigger is None:
        raise ConfigError(f"attack: {run.path} has none with a trigger; choose a run under a backdoor attack")
    labels = _tested(federation).label.tolist()
    return [place for place, label in enumerate(labels) if label != trigger.target][:many]


def _tested(federation: Federation) -> ClientRows:
    """The dataset's test split; where it has none, the test samples of all clients."""
    return federation.global_test if len(federation.global_test.row) else federation.test


def _images(runs: Mapping[str, Run], images: Sequence[int], triggered: bool) -> tuple[Samples, Tensor]:
    """The chosen test images as a small store of their own, and their true labels."""
    first = next(iter(runs.values()))
    federation = first._experiment.federation
    samples, table = federation.samples, _tested(federation)
    for name, run in runs.items():
        other = run._experiment.federation.samples
        if (other.name, other.sample_shape, other.classes) != (
            samples.name,
            samples.sample_shape,
            samples.classes,
        ):
            raise ConfigError(
                f"runs: '{name}' is about {other.name}, the first one about {samples.name}; show runs on the"
                " same data"
            )
    if samples.words or len(samples.sample_shape) != 3:
        raise ConfigError(f"data: Grad-CAM needs images, but a sample of {samples.name} is not an image")
    if min(images) < 0 or max(images) >= len(table.row):
        raise ConfigError(
            f"images: the test set has images 0 to {len(table.row) - 1}, got {min(images)} to {max(images)}"
        )
    chosen = torch.tensor(list(images))
    x = samples.x[table.row[chosen]]
    if triggered:
        attacks = [run._experiment.adversary.attack for run in runs.values()]
        triggers = [attack.planted(samples) for attack in attacks if attack is not None]
        stamps = [trigger.stamp for trigger in triggers if trigger is not None]
        if not stamps:
            raise ConfigError(
                "triggered: no run has an attack with a trigger; set it to false, or choose runs under a"
                " backdoor attack"
            )
        x = stamps[0](x)
    return replace(samples, x=x, y=table.label[chosen], train_rows=0, user=None), table.label[chosen]


def _pixels(samples: Samples, place: int) -> np.ndarray:
    """[side, side, 3] of bytes; other numbers are scaled to the range of this image."""
    image = samples.x[place].double()
    if samples.x.dtype == torch.uint8:
        image = image / 255
    else:
        low, high = image.amin(), image.amax()
        image = (image - low) / (high - low).clamp(min=1e-12)
    image = image if image.shape[0] == 3 else image.mean(dim=0, keepdim=True).expand(3, -1, -1)
    picture = Image.fromarray((image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
    return np.asarray(picture.resize((_SIDE, _SIDE), Image.Resampling.NEAREST))


def _overlaid(pixels: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """From blue (nothing) to red (most), half of it seen through."""
    wide = np.asarray(
        Image.fromarray(heat.astype(np.float32)).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    ).clip(0, 1)
    colours = np.stack([wide, 1 - np.abs(2 * wide - 1), 1 - wide], axis=2) * 255
    return (0.5 * pixels + 0.5 * colours).round().astype(np.uint8)


def _sheet(
    tiles: list[list[np.ndarray]], frames: list[list[tuple[int, int, int]]], names: list[str]
) -> Image.Image:
    step = _SIDE + 2 * _FRAME + _GAP
    sheet = Image.new("RGB", (_GAP + step * len(names), _HEAD + _GAP + step * len(tiles)), (255, 255, 255))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for column, name in enumerate(names):
        draw.text(
            (_GAP + step * column + _FRAME, _HEAD / 2 + 2),
            shorten(name, 18),
            fill=_INK,
            font=font,
            anchor="lm",
        )
    for row, line in enumerate(tiles):
        for column, tile in enumerate(line):
            left, top = _GAP + step * column, _HEAD + step * row
            if column:
                draw.rectangle(
                    (left, top, left + _SIDE + 2 * _FRAME - 1, top + _SIDE + 2 * _FRAME - 1),
                    fill=frames[row][column - 1],
                )
            sheet.paste(Image.fromarray(tile), (left + _FRAME, top + _FRAME))
    return sheet

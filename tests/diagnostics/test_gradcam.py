from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.diagnostics.gradcam import grad_cam, write_picture
from holdfast.results.run import Run

BACKDOOR = {"name": "backdoor", "size": 2, "fraction": 0.4}


class Linear(nn.Module):
    """Two channels that are the image times 1 and times -2; class 0 is the sum of the first, class 1 the sum
    of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1, bias=False)
        self.out = nn.Linear(8, 2, bias=False)
        with torch.no_grad():
            self.conv.weight.copy_(torch.tensor([1.0, -2.0]).view(2, 1, 1, 1))
            self.out.weight.copy_(torch.tensor([[1.0] * 4 + [0.0] * 4, [0.0] * 4 + [1.0] * 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.conv(x).flatten(1))


IMAGE = torch.tensor([[[[4.0, 1.0], [-2.0, 0.0]]]])


def test_a_linear_network_by_hand() -> None:
    """Class 0: the weights of the channels are (1, 0), the map is the image's positive part over its largest.
    Class 1: (0, 1), and the second channel is positive where the image is negative."""
    heat, about = grad_cam(Linear(), IMAGE)
    assert about.tolist() == [0]  # the outputs are 3 and -6
    assert heat.tolist() == [[[1, 0.25], [0, 0]]]
    heat, about = grad_cam(Linear(), IMAGE, torch.tensor([1]))
    assert about.tolist() == [1] and heat.tolist() == [[[0, 0], [1, 0]]]


def test_gradients_are_averaged_over_the_channel() -> None:
    """With class 0 = 2 a + 0 b + 0 c - d of the first channel and nothing else, its weight is (2 - 1) / 4."""
    net = Linear()
    with torch.no_grad():
        net.out.weight[0, :4] = torch.tensor([2.0, 0, 0, -1])
        net.conv.weight[0] = 3
    heat, _ = grad_cam(net, IMAGE, torch.tensor([0]))
    assert heat.tolist() == [[[1, 0.25], [0, 0]]]  # a positive weight: as above, whatever its size
    with torch.no_grad():
        net.out.weight[0, :4] = torch.tensor([-2.0, 0, 0, 1])
    assert grad_cam(net, IMAGE, torch.tensor([0]))[0].tolist() == [[[0, 0], [1, 0]]]


def test_small_maps_are_stretched_and_nothing_is_left_behind() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 4, stride=4), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)
    ).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for p in net.parameters():
        p.requires_grad_(False)
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    heat, about = grad_cam(net, images)
    assert not images.requires_grad
    assert heat.shape == (5, 8, 8) and about.shape == (5,) and (heat >= 0).all() and (heat <= 1).all()
    assert (
        net.training
        and not net[0]._forward_hooks
        and all(torch.equal(v, before[n]) for n, v in net.state_dict().items())
    )


def test_a_layer_that_writes_in_place_changes_no_map() -> None:
    convolution, head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3 * 36, 2)
    nets = [
        nn.Sequential(convolution, nn.ReLU(inplace=inplace), nn.Flatten(), head) for inplace in (False, True)
    ]
    images = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    apart, in_place = (grad_cam(net, images, torch.tensor([0, 1]))[0] for net in nets)
    torch.testing.assert_close(in_place, apart)
    assert bool(apart.any())


def test_networks_without_a_convolution_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a network with a convolution"):
        grad_cam(nn.Linear(4, 2), torch.zeros(1, 4))
    with pytest.raises(ConfigError, match="no convolution 'out'; it has conv"):
        grad_cam(Linear(), IMAGE, layer="out")


def test_a_backdoored_and_a_defended_model_side_by_side(simulate: Callable[..., Run], tmp_path: Path) -> None:
    common = {"model": {"name": "lenet", "margin": 4}, "attack": BACKDOOR, "train": {"rounds": 1}}
    runs = {"mean": simulate(**common), "fedcpa": simulate(aggregator="fedcpa", **common)}
    told = write_picture(runs, [0, 3, 5], tmp_path / "cam.png")
    assert told["image"].tolist() == [0, 3, 5] * 2 and told["model"].tolist() == ["mean"] * 3 + ["fedcpa"] * 3
    module, table = runs["mean"].model(), runs["mean"]._experiment.federation.global_test
    assert told["label"][:3].tolist() == table.label[[0, 3, 5]].tolist()
    plain = write_picture({"mean": runs["mean"]}, [0, 3, 5], tmp_path / "plain.png", triggered=False)
    x = runs["mean"]._experiment.federation.samples.batch(table.row[[0, 3, 5]], torch.float64)
    assert plain["predicted"].tolist() == module.double()(x).argmax(1).tolist()
    with Image.open(tmp_path / "cam.png") as sheet, Image.open(tmp_path / "plain.png") as other:
        assert sheet.size[0] > other.size[0] and sheet.size[1] == other.size[1]
    with pytest.raises(ConfigError, match="images: the test set has images 0 to"):
        write_picture(runs, [10**6], tmp_path / "no.png")
    experiment = runs["fedcpa"]._experiment
    experiment.federation = replace(
        experiment.federation, samples=replace(experiment.federation.samples, name="letters")
    )
    with pytest.raises(ConfigError, match="runs: 'fedcpa' is about letters, the first one about digits"):
        write_picture(runs, [0], tmp_path / "no.png")
    assert not (tmp_path / "no.png").exists()


def test_without_a_trigger(simulate: Callable[..., Run], tmp_path: Path) -> None:
    run = simulate(model={"name": "lenet", "margin": 4}, train={"rounds": 1})
    with pytest.raises(ConfigError, match="triggered: no run has an attack with a trigger"):
        write_picture({"mean": run}, [0], tmp_path / "no.png")

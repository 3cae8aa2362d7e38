from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.core.errors import ConfigError
from holdfast.core.registry import build

DIGITS, CIFAR, EMNIST, WISDM, TEXT = (1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 200), (12,)


def network(sample_shape: tuple[int, ...] = DIGITS, classes: int = 10, **table: Any) -> nn.Module:
    return build("model", table).build(sample_shape, classes)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("table", "sample_shape", "classes", "parameters"),
    [
        ({"name": "fedcap-cnn"}, CIFAR, 10, 156_810),
        ({"name": "fedcap-cnn"}, EMNIST, 62, 86_910),
        ({"name": "fedcap-cnn"}, WISDM, 6, 203_782),
        ({"name": "fedcap-cnn"}, (9, 128), 6, 9 * 5 * 32 + 32 + 10_304 + (64 * 29 + 1) * 64 + 390),
        ({"name": "cnn-512"}, CIFAR, 10, 878_538),
        ({"name": "cnn-512"}, EMNIST, 10, 582_026),
        ({"name": "lenet"}, EMNIST, 10, 61_706),
        ({"name": "lenet"}, CIFAR, 10, 62_006),
        ({"name": "lenet", "margin": 0}, EMNIST, 10, 61_706 - (400 - 256) * 120),
        ({"name": "resnet18", "norm": "batch"}, CIFAR, 10, 11_173_962),
        ({"name": "resnet18"}, (3, 64, 64), 200, 11_173_962 + 190 * 513),
        ({"name": "resnet18"}, EMNIST, 10, 11_173_962 - 2 * 9 * 64),
        ({"name": "text-cnn"}, TEXT, 4, 16_384 * 32 + 100 * ((3 + 4 + 5) * 32 + 3) + 301 * 4),
        (
            {"name": "text-cnn", "kernels": 2, "rows": 9, "embedding": 3, "channels": 5},
            TEXT,
            2,
            9 * 3 + 5 * (2 * 3 + 1) + 6 * 2,
        ),
        ({"name": "text-mean"}, TEXT, 4, 16_384 * 32 + 33 * 32 + 33 * 4),
        ({"name": "fedcap-cnn", "form": "cifar"}, EMNIST, 10, 832 + 51_264 + (64 * 16 + 1) * 64 + 650),
        ({"name": "fedcap-cnn", "form": "emnist"}, CIFAR, 10, 1_216 + 12_832 + (32 * 25 + 1) * 128 + 1_290),
        ({"name": "mlp"}, DIGITS, 10, 65 * 64 + 65 * 10),
        ({"name": "mlp", "hidden": [32, 16]}, DIGITS, 10, 65 * 32 + 33 * 16 + 17 * 10),
        ({"name": "mlp", "hidden": []}, DIGITS, 10, 65 * 10),
        ({"name": "mlp", "batch_norm": True, "dropout": 0.5}, DIGITS, 10, 65 * 64 + 128 + 65 * 10),
        ({"name": "mlp"}, (9, 128), 6, (9 * 128 + 1) * 64 + 65 * 6),
        ({"name": "cnn-bn"}, DIGITS, 10, 160 + 32 + 4_640 + 64 + (32 * 4 + 1) * 64 + 650),
        ({"name": "resnet18"}, (3, 32, 32), 10, 11_173_962),
        ({"name": "cnn-bn", "channels": 4, "hidden": 8}, DIGITS, 10, 40 + 8 + (4 * 16 + 1) * 8 + 90),
    ],
)
def test_networks_have_the_expected_sizes_and_shapes(
    table: dict[str, Any], sample_shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    net = network(sample_shape, classes, **table)
    assert count(net) == parameters
    x = torch.randint(0, 2**31, (3, *sample_shape)) if sample_shape == TEXT else torch.randn(3, *sample_shape)
    logits = net.eval()(x)
    assert logits.shape == (3, classes)
    assert torch.equal(logits, net.head(net.backbone(x)))  # type: ignore[operator]


def test_a_head_may_be_wider_than_the_number_of_classes() -> None:
    net = network(CIFAR, name="resnet18", outputs=1000)
    assert net.head.out_features == 1000 and count(net) == 11_173_962 + 990 * 513
    with pytest.raises(ConfigError, match="model.outputs = 9 is fewer than the 10 classes"):
        network(CIFAR, name="resnet18", outputs=9)


def test_fedcap_cnn_computes_what_the_paper_draws() -> None:
    net = network(CIFAR, name="fedcap-cnn").double()
    w = OrderedDict(net.named_parameters())
    assert [tuple(p.shape) for p in w.values()][::2] == [(32, 3, 5, 5), (64, 32, 5, 5), (64, 1600), (10, 64)]
    (c1, b1), (c2, b2), (f1, d1), (f2, d2) = zip(list(w.values())[::2], list(w.values())[1::2], strict=True)
    x = torch.randn(2, *CIFAR, dtype=torch.float64)
    h = torch.max_pool2d(torch.conv2d(x, c1, b1).relu(), 2)
    h = torch.max_pool2d(torch.conv2d(h, c2, b2).relu(), 2).flatten(1)
    h = (h @ f1.T + d1).relu()
    torch.testing.assert_close(net(x), h @ f2.T + d2)


def test_the_sensor_form_convolves_along_time_alone() -> None:
    net = network((2, 18), 3, name="fedcap-cnn").double()
    (c1, b1), (c2, b2), (f1, d1), (f2, d2) = zip(*[iter(net.parameters())] * 2, strict=True)
    x = torch.randn(2, 2, 18, dtype=torch.float64)
    h = torch.max_pool1d(torch.conv1d(x, c1[:, :, 0], b1).relu(), 2)
    h = torch.max_pool1d(torch.conv1d(h, c2[:, :, 0], b2).relu(), 2).flatten(1)
    torch.testing.assert_close(net(x), (h @ f1.T + d1).relu() @ f2.T + d2)


def test_lenet_sees_small_images_in_a_frame() -> None:
    net, x = network(EMNIST, name="lenet").double(), torch.randn(2, *EMNIST, dtype=torch.float64)
    framed = network((1, 32, 32), name="lenet").double()
    framed.load_state_dict(net.state_dict())
    torch.testing.assert_close(net(x), framed(nn.functional.pad(x, (2, 2, 2, 2))))
    (c1, b1), (c2, b2), (f1, d1), (f2, d2), (f3, d3) = zip(*[iter(net.parameters())] * 2, strict=True)
    assert [len(w) for w in (c1, c2, f1, f2, f3)] == [6, 16, 120, 84, 10]
    h = torch.max_pool2d(torch.conv2d(x, c1, b1, padding=2).relu(), 2)
    h = torch.max_pool2d(torch.conv2d(h, c2, b2).relu(), 2).flatten(1)
    torch.testing.assert_close(net(x), ((h @ f1.T + d1).relu() @ f2.T + d2).relu() @ f3.T + d3)


def test_normalisation_and_dropout_are_where_they_were_asked_for() -> None:
    kinds = [type(m) for m in network(name="cnn-bn", dropout=0.3).modules()]
    assert kinds.count(nn.BatchNorm2d) == 2 and kinds.count(nn.Dropout) == 1
    kinds = [type(m) for m in network(name="mlp", hidden=[8, 8], batch_norm=True, dropout=0.3).modules()]
    assert kinds.count(nn.BatchNorm1d) == 2 and kinds.count(nn.Dropout) == 2
    plain = [type(m) for m in network(name="mlp").modules()]
    assert nn.BatchNorm1d not in plain and nn.Dropout not in plain


@pytest.mark.parametrize(
    ("table", "sample_shape", "message"),
    [
        ({"name": "fedcap-cnn"}, DIGITS, "model 'fedcap-cnn' needs images of at least 16x16, not 8x8"),
        ({"name": "fedcap-cnn"}, (1, 28, 15), "not 28x15"),
        ({"name": "fedcap-cnn"}, (9, 15), "model 'fedcap-cnn' needs windows of at least 16, not 15"),
        ({"name": "fedcap-cnn"}, (64,), r"model 'fedcap-cnn' needs images .* shape \[64\]"),
        (
            {"name": "fedcap-cnn", "form": "sensor"},
            CIFAR,
            r"model.form = \"sensor\" does not fit samples of shape \[3, 32, 32\]",
        ),
        (
            {"name": "fedcap-cnn", "form": "cifar"},
            WISDM,
            r"model.form = \"cifar\" does not fit samples of shape \[3, 200\]",
        ),
        ({"name": "cnn-512"}, WISDM, r"model 'cnn-512' needs images .* shape \[3, 200\]"),
        ({"name": "lenet"}, DIGITS, "model 'lenet' needs images of at least 12x12, not 8x8"),
        ({"name": "text-cnn"}, CIFAR, r"model 'text-cnn' needs texts .* shape \[3, 32, 32\]"),
        ({"name": "text-cnn", "kernels": []}, TEXT, "model.kernels: expected at least one"),
        (
            {"name": "text-cnn", "kernels": [3, 0]},
            TEXT,
            "model.kernels: expected a whole number of at least 1",
        ),
        ({"name": "text-mean", "rows": 1}, TEXT, "model.rows"),
        ({"name": "cnn-bn"}, (64,), r"model 'cnn-bn' needs images .* shape \[64\]"),
        (
            {"name": "cnn-bn", "channels": [8, 8, 8, 8]},
            DIGITS,
            "4 blocks needs images of at least 16x16, not 8x8",
        ),
        ({"name": "mlp", "hidden": 0}, DIGITS, "model.hidden: expected a whole number of at least 1"),
        ({"name": "mlp", "hidden": [64, -1]}, DIGITS, "model.hidden: expected a whole number of at least 1"),
        ({"name": "mlp", "hidden": "wide"}, DIGITS, "model.hidden: expected a whole number"),
        ({"name": "mlp", "dropout": 1.0}, DIGITS, "model.dropout"),
        ({"name": "mlp", "hiden": 3}, DIGITS, "unknown key 'model.hiden'; did you mean 'hidden'"),
        ({"name": "fedcap-cnn", "form": "svhn"}, DIGITS, "model.form"),
        ({"name": "fedcap"}, DIGITS, "unknown model 'fedcap'; did you mean 'fedcap-cnn'"),
    ],
)
def test_unsuitable_samples_are_a_one_line_error(
    table: dict[str, Any], sample_shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        network(sample_shape, **table)
    assert "\n" not in str(error.value)

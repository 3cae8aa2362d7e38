"""The device that tests use in place of a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.pretended_gpu import pretended_gpu


def test_host_and_device_do_not_mix_and_what_crosses_is_counted() -> None:
    with pretended_gpu() as gpu:
        x = torch.arange(12.0, dtype=torch.float64).view(3, 4).to(gpu.device)
        assert gpu.bytes_to_device == 96 and gpu.reads == 0
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3, 4)
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([x, torch.ones(1, 4, dtype=torch.float64)])
        with pytest.raises(TypeError):
            x.numpy()
        chosen = x[torch.tensor([True, False, True])] * torch.tensor(
            2.0
        )  # as CUDA: a host index, a host number
        assert chosen.device == gpu.device and gpu.reads == 0
        x[1:] += 1  # a view shares memory
        assert torch.equal(chosen.cpu(), 2 * torch.tensor([[0.0, 1, 2, 3], [8, 9, 10, 11]]).double())
        assert (gpu.reads, gpu.bytes_to_host, gpu.largest_read) == (1, 64, 64)
        assert x.sum().item() == 66 + 8 and bool((x > 3).any())
        assert x[x > 11].shape == (1,)  # the host waits for the number of rows
        assert gpu.reads == 4
        with gpu.not_counted():
            x.tolist()
        assert gpu.reads == 4

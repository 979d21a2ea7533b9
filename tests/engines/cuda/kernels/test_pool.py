"""Pools by our kernel against PyTorch's, of data that lie anyhow. On a GPU, or with TRITON_INTERPRET=1."""

import os

import pytest
import torch
import torch.nn.functional as F

from msplit.engines.cuda.ir.windows import Window

pytestmark = [pytest.mark.gpu, pytest.mark.interpretable]

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def frame(size, kernel, stride, before, after):
    return Window(size, kernel, stride, 1, before, after, (size + before + after - kernel) // stride + 1)


def laid(how, channels, dtype):
    """2 × 7 × 6 pixels that lie one behind the other, inside of a larger image, as channels of others, or a column behind the other."""
    full = {"dense": (2, 7, 6, channels), "inside": (2, 9, 8, channels), "channels": (2, 7, 6, channels + 12)}
    shape = full.get(how, (2, 6, 7, channels))
    data = torch.randn(shape, generator=torch.Generator().manual_seed(channels)).to(dtype).to(DEVICE)
    if how == "inside":
        return data[:, 2:, 1:7]
    if how == "channels":
        return data[..., 8 : channels + 8]
    return data.transpose(1, 2) if how == "columns" else data


def expected(data, frames, mean):
    vertical, horizontal = frames
    pads = (horizontal.before, horizontal.after, vertical.before, vertical.after)
    kernel, stride = (vertical.kernel, horizontal.kernel), (vertical.stride, horizontal.stride)
    planes = data.permute(0, 3, 1, 2).float()
    if not mean:
        return F.max_pool2d(F.pad(planes, pads, value=-torch.inf), kernel, stride).permute(0, 2, 3, 1).to(data.dtype)
    counts = F.avg_pool2d(F.pad(torch.ones_like(planes), pads), kernel, stride)
    return (F.avg_pool2d(F.pad(planes, pads), kernel, stride) / counts).permute(0, 2, 3, 1).to(data.dtype)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("how", ["dense", "inside", "channels", "columns"])
@pytest.mark.parametrize("channels", [1, 6, 20, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pools_of_data_that_lie_anyhow(mean, how, channels, dtype):
    from msplit.engines.cuda.kernels import channelwise

    data = laid(how, channels, dtype)
    assert data.shape == (2, 7, 6, channels)
    for frames in (
        (frame(7, 3, 1, 1, 1), frame(6, 3, 1, 0, 2)),
        (frame(7, 1, 2, 0, 0), frame(6, 1, 2, 0, 0)),
        (frame(7, 7, 1, 0, 0), frame(6, 5, 2, 2, 1)),
    ):
        assert channelwise.fits_in(data)
        wanted = expected(data, frames, mean)
        close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(channelwise.pool(data, frames, mean=mean), wanted, **close)
        room = torch.full((2, *(one.outputs + 1 for one in frames), channels + 4), 7.0, device=DEVICE, dtype=dtype)
        part = room[:, 1:, 1:, 4:]
        assert channelwise.fits_in(part)
        assert channelwise.pool(data, frames, part, mean=mean) is part
        torch.testing.assert_close(part, wanted, **close)
        assert (room[:, :1] == 7).all()
        assert (room[:, :, :1] == 7).all()
        assert (room[..., :4] == 7).all()


def test_where_there_is_no_number_there_is_none():
    from msplit.engines.cuda.kernels import channelwise

    data = torch.randn(1, 6, 6, 8, device=DEVICE)
    data[0, 3, 3, 5] = torch.nan
    frames = (frame(6, 3, 1, 1, 1),) * 2
    for mean in (False, True):
        found = channelwise.pool(data, frames, mean=mean)
        assert found[0, 2:5, 2:5, 5].isnan().all()
        assert found.isnan().sum() == 9

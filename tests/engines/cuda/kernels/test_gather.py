import pytest

from tests.engines.cuda.interpreted import run_interpreted

# Runs in a process of its own: Triton decides at import whether it interprets its kernels, on the CPU, or compiles them.
SCRIPT = """
import torch
from msplit.engines.cuda.kernels import memory as gather_kernel

generator = torch.Generator().manual_seed(0)
for batch, outer, size, inner, count in [
    (1, 1, 6, 3, 5), (1, 1, 6, 64, 130), (2, 3, 7, 5, 9), (1, 4, 3, 1, 300), (3, 1, 5, 16, 1), (1, 1, 4, 0, 2), (2, 1, 0, 3, 2)
]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64):
        for index in (torch.int32, torch.int64):
            table = torch.randint(0, 100, (batch, outer, size, inner), generator=generator).to(dtype)
            indices = torch.randint(-2, size + 2, (batch, count), generator=generator).to(index)
            expected = torch.zeros(batch, outer, count, inner, dtype=dtype)
            for b in range(batch):
                for m, row in enumerate(indices[b].tolist()):
                    if 0 <= row < size:
                        expected[b, :, m] = table[b, :, row]
            for wide_from in (0, 2**30):
                gather_kernel._WIDE_FROM = wide_from
                result = gather_kernel.gather(table, indices)
                assert result.dtype == dtype and result.equal(expected), (batch, outer, size, inner, count, dtype, index)

for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128):
    for count in (0, 1, 1023, 2049):
        source = torch.randint(0, 100, (count + 1,), generator=generator).to(dtype)[1:]  # aligned to an element alone
        target = torch.full((count + 1,), 101).to(dtype)
        gather_kernel.copy(source, target[:count])
        assert target[:count].equal(source) and target[count] == torch.tensor(101).to(dtype), (dtype, count)
"""


@pytest.mark.needs_triton
def test_kernels_gather_rows_and_zeros_for_wrong_indices_and_copy():
    run_interpreted(SCRIPT)

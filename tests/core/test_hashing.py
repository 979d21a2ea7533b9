import numpy as np

from msplit.core.hashing import mixed


def test_hashes_are_those_of_splitmix64() -> None:
    """What its authors' generator gives for the seed 0: each state is the one before and 0x9E3779B97F4A7C15."""
    step = 0x9E3779B97F4A7C15
    states = np.asarray([0, step, 2 * step % 2**64], np.uint64)
    assert mixed(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]

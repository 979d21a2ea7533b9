import numpy as np
import pytest

from .harness import check, values

pytestmark = pytest.mark.tf

COLORS = [
    values((2, 3, 4, 3), low=0, high=1),
    values((5, 3), seed=1),
    np.float32([[0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.2]]),
]


@pytest.mark.parametrize("colors", COLORS, ids=lambda colors: str(colors.shape))
def test_hue_saturation_value(colors):
    check("RGBToHSV", [colors], atol=1e-6)
    check("HSVToRGB", [np.abs(colors) % 1], atol=1e-6)


@pytest.mark.parametrize("number", [-0.7, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(2, 3, 4, 3), (3, 3, 3)], ids=str)
def test_adjusted(shape, number):
    for low in (0, -1):
        images = values(shape, low=low, high=1)
        check("AdjustHue", [images, np.float32(number)], atol=2e-6)
        check("AdjustSaturation", [images, np.float32(number + 1)], atol=2e-6)
        check("AdjustContrastv2", [images, np.float32(number)], atol=2e-6)


def test_gray_and_two_equal_colors():
    images = np.float32([[[[0.2, 0.2, 0.2], [0.7, 0.7, 0.1], [0.1, 0.7, 0.7], [0.7, 0.1, 0.7]]]])
    for number in (0.0, 0.25, -0.5):
        check("AdjustHue", [images, np.float32(number)], atol=1e-6)
        check("AdjustSaturation", [images, np.float32(number + 1)], atol=1e-6)

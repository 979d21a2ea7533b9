"""Images, NHWC: resizing, colors, windows as values of their own."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.campaign import examples, sampled

from .harness import BFLOAT16, check, ints, values

pytestmark = pytest.mark.tf

PLACEMENTS = [{}, {"align_corners": True}, {"half_pixel_centers": True}]
SIZES = [(1, 1), (2, 3), (5, 7), (10, 14), (8, 3), (13, 20)]


@sampled(18, op=["ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic"], attrs=PLACEMENTS, target=SIZES)
def test_resize(op, attrs, target):
    # Places are float32: where two pixels differ, so does the result, a little.
    tolerance = {"ResizeBilinear": 1e-5, "ResizeNearestNeighbor": 0, "ResizeBicubic": 1e-4}[op]
    for shape in ((2, 5, 7, 3), (1, 1, 1, 1), (1, 8, 6, 2)):
        check(op, [values(shape), ints(*target)], attrs, atol=tolerance)


@settings(max_examples=examples(25, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    op=st.sampled_from(["ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic"]),
    source=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    target=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    attrs=st.sampled_from(PLACEMENTS),
)
def test_resize_between_any_sizes(op, source, target, attrs):
    tolerance = {"ResizeBilinear": 1e-4, "ResizeNearestNeighbor": 0, "ResizeBicubic": 1e-2}[op]
    check(op, [values((1, *source, 1)), ints(*target)], attrs, atol=tolerance)


@sampled(
    27,
    op=["ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic"],
    dtype=["uint8", "int8", "int16", "uint16", "int32", "int64", "float16", BFLOAT16, "float64"],
    attrs=PLACEMENTS,
)
def test_resize_dtypes(op, dtype, attrs):
    check(op, [values((2, 5, 7, 3), dtype, low=-99, high=99), ints(8, 4)], attrs, atol=1e-3)


@pytest.mark.parametrize("method", ["bilinear", "nearest"])
@pytest.mark.parametrize("target", [(1, 1), (3, 5), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "float16"])
def test_crop_and_resize(method, target, dtype):
    boxes = np.array(
        [[0, 0, 1, 1], [0.1, 0.2, 0.7, 0.6], [0.9, 0.8, 0.1, 0.3], [-0.4, 0.2, 1.3, 2], [0.5, 0.5, 0.5, 0.5]],
        np.float32,
    )
    images = values((3, 6, 7, 2), dtype, high=99)
    inputs = [images, boxes, np.array([0, 1, 2, 1, 0], np.int32), ints(*target)]
    check("CropAndResize", inputs, {"method": method, "extrapolation_value": 7.5}, atol=1e-4)


def test_crop_and_resize_of_no_boxes():
    inputs = [values((2, 6, 7, 3)), np.zeros((0, 4), np.float32), np.zeros(0, np.int32), ints(2, 2)]
    check("CropAndResize", inputs)


@pytest.mark.parametrize("size", [4, 7, 13, 28])
@pytest.mark.parametrize("crop", [7, 8, 14, 15, 27])
@pytest.mark.parametrize("method", ["bilinear", "nearest"])
def test_a_crop_of_the_whole_image_ends_with_its_last_pixel(size, crop, method):
    """The last bit of a quotient decides whether it is in the image."""
    boxes = np.array([[0, 0, 1, 1], [1, 1, 0, 0]], np.float32)
    inputs = [values((2, size, size, 1)), boxes, np.array([0, 1], np.int32), np.array([crop, crop], np.int32)]
    check("CropAndResize", inputs, {"method": method, "extrapolation_value": 7.5}, atol=1e-4)


@pytest.mark.parametrize("op", ["ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic"])
@pytest.mark.parametrize("attrs", PLACEMENTS, ids=str)
def test_resize_of_an_empty_batch(op, attrs):
    check(op, [values((0, 5, 7, 3)), ints(4, 8)], attrs)


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


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 4)], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("rate", [(1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_windows(kernel, stride, rate, padding):
    sizes = {"strides": (1, *stride, 1), "rates": (1, *rate, 1), "padding": padding}
    images = values((2, 7, 8, 3))
    check("ExtractImagePatches", [images], {"ksizes": (1, *kernel, 1), **sizes}, exact=True)
    check("Dilation2D", [images, values((*kernel, 3), seed=1)], sizes)


@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.float64])
def test_patches_of_other_types(dtype):
    sizes = {"ksizes": (1, 2, 2, 1), "strides": (1, 2, 2, 1), "rates": (1, 1, 1, 1), "padding": "SAME"}
    check("ExtractImagePatches", [values((1, 5, 5, 2), dtype)], sizes, exact=True)


PROJECTIONS = {
    "same": [[1, 0, 0, 0, 1, 0, 0, 0]],
    "one each": [[1.1, 0.2, -3, 0.1, 0.9, 2.2, 0, 0], [0.7, 0.3, 1.5, -0.4, 1.2, -9.1, 0.01, 0.02]],
    "far away": [[2, 0, -13, 0, 2, 17, 0, 0]],
    "nowhere": [[1, 0, 0, 0, 1, 0, -1, 0]],
}


@pytest.mark.parametrize("mode", ["CONSTANT", "REFLECT", "WRAP", "NEAREST"])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_projections(mode, projection):
    by, size = np.array(PROJECTIONS[projection], np.float32), ints(4, 7)
    for dtype, how in [("float32", "BILINEAR"), ("float32", "NEAREST"), ("uint8", "NEAREST"), ("int32", "NEAREST")]:
        attrs = {"interpolation": how, "fill_mode": mode}
        image = values((2, 6, 5, 3), dtype, low=0, high=50)
        check("ImageProjectiveTransformV3", [image, by, size, np.float32(2)], attrs)
        check("ImageProjectiveTransformV2", [image, by, size], attrs)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 2, 4, 6])
def test_projections_to_no_place_give_what_is_outside(number, place):
    by = np.array(PROJECTIONS["same"], np.float32)
    by[0, place] = number
    for how in ("BILINEAR", "NEAREST"):
        attrs = {"interpolation": how, "fill_mode": "CONSTANT"}
        check("ImageProjectiveTransformV3", [values((2, 6, 5, 3)), by, ints(4, 7), np.float32(2)], attrs)

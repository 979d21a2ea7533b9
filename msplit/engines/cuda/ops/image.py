"""Images, NHWC: resizing, colors, windows as values of their own.

There are three ways to place output pixels on the input, by the attributes `align_corners` and `half_pixel_centers`; where both are
absent, TensorFlow's old way: output pixel i lies at ``i * input size / output size``. PyTorch's kernels know two of the three.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import spatial, windows
from msplit.engines.cuda.ops.cast import divided
from msplit.engines.cuda.ops.shape import integers

# TensorFlow reads the weights of bicubic resizing from a table with this many steps between two pixels.
_CUBIC_STEPS = 1024


@lowering("ResizeBilinear", static=(1,))
def resize_bilinear(node: Node, images: Tensor, size: np.ndarray) -> Tensor:
    """Linear interpolation between the four nearest pixels; the result is float32."""
    height, width = integers(size)
    images = images.to(torch.float32)
    align, half = _placement(node)
    data = images.permute(0, 3, 1, 2)
    if align or half:
        return F.interpolate(data, (height, width), mode="bilinear", align_corners=align).permute(0, 2, 3, 1)
    # The old way is PyTorch's aligned corners with one pixel more on either side: (size + 1 - 1) / (count + 1 - 1).
    longer = F.pad(data, (0, 1, 0, 1), mode="replicate")
    result = F.interpolate(longer, (height + 1, width + 1), mode="bilinear", align_corners=True)
    return result[:, :, :height, :width].permute(0, 2, 3, 1)


@lowering("ResizeNearestNeighbor", static=(1,))
def resize_nearest(node: Node, images: Tensor, size: np.ndarray) -> Tensor:
    """The nearest pixel."""
    height, width = integers(size)
    align, half = _placement(node)
    if not align and images.is_floating_point() and images.numel():
        mode = "nearest-exact" if half else "nearest"
        return F.interpolate(images.permute(0, 3, 1, 2), (height, width), mode=mode).permute(0, 2, 3, 1)
    rows = nearest_pixels(node, images.shape[1], height, images.device)
    columns = nearest_pixels(node, images.shape[2], width, images.device)
    bits = images.view(torch.int16) if images.dtype == torch.uint16 else images
    return bits[:, rows[:, None], columns].view(images.dtype)


@lowering("ResizeBicubic", static=(1,))
def resize_bicubic(node: Node, images: Tensor, size: np.ndarray) -> Tensor:
    """Cubic interpolation over the sixteen nearest pixels (Keys, 1981); the result is float32."""
    height, width = integers(size)
    images = images.to(torch.float32)
    down = cubic_weights(node, images.shape[1], height, images.device)
    across = cubic_weights(node, images.shape[2], width, images.device)
    return torch.einsum("oh,bhwc,pw->bopc", down, images, across)


@lowering("CropAndResize", static=(3,))
def crop_and_resize(node: Node, image: Tensor, boxes: Tensor, box_ind: Tensor, crop_size: np.ndarray) -> Tensor:
    """Cuts boxes out of images and resizes each to one size; the result is float32."""
    height, width = integers(crop_size)
    y, inside_y = _crop_places(boxes[:, 0], boxes[:, 2], height, image.shape[1])
    x, inside_x = _crop_places(boxes[:, 1], boxes[:, 3], width, image.shape[2])
    batch = box_ind.long()[:, None, None]

    def pixels(rows: Tensor, columns: Tensor) -> Tensor:
        last_row, last_column = image.shape[1] - 1, image.shape[2] - 1
        rows, columns = rows.clamp(0, last_row).long(), columns.clamp(0, last_column).long()
        return image[batch, rows[:, :, None], columns[:, None, :]].to(torch.float32)

    if node.get("method", "bilinear") == "nearest":
        result = pixels(_round_half_away(y), _round_half_away(x))
    else:
        down, across = (y - y.floor())[:, :, None, None], (x - x.floor())[:, None, :, None]
        upper = torch.lerp(pixels(y.floor(), x.floor()), pixels(y.floor(), x.ceil()), across)
        lower = torch.lerp(pixels(y.ceil(), x.floor()), pixels(y.ceil(), x.ceil()), across)
        result = torch.lerp(upper, lower, down)
    inside = (inside_y[:, :, None] & inside_x[:, None, :])[..., None]
    return torch.where(inside, result, node.get("extrapolation_value", 0.0))


def _placement(node: Node) -> tuple[bool, bool]:
    """The attributes align_corners and half_pixel_centers."""
    return bool(node.get("align_corners", False)), bool(node.get("half_pixel_centers", False))


def _scale(size: int, count: int, align: bool) -> float:
    """Distance between output pixels in input pixels, as the float32 that TensorFlow computes."""
    if align and count > 1:
        return float(np.float32(size - 1) / np.float32(count - 1))
    return float(np.float32(size) / np.float32(count))


def _places(size: int, count: int, align: bool, half: bool, device: torch.device) -> Tensor:
    """Place of each of `count` output pixels on an axis of `size` input pixels: float32 of shape (count,)."""
    index = torch.arange(count, dtype=torch.float32, device=device)
    scale = _scale(size, count, align)
    return (index + 0.5) * scale - 0.5 if half else index * scale


def linear_weights(node: Node, size: int, count: int, device: torch.device) -> Tensor:
    """The weight of every input pixel for every output pixel of a linear interpolation, of shape (count, size)."""
    align, half = _placement(node)
    place = _places(size, count, align, half, device)
    lower, upper = place.floor().clamp(min=0).long(), place.ceil().clamp(max=size - 1).long()
    share = (place - place.floor())[:, None]
    pixels = torch.arange(size, device=device)
    return (1 - share) * (lower[:, None] == pixels) + share * (upper[:, None] == pixels)


def nearest_pixels(node: Node, size: int, count: int, device: torch.device) -> Tensor:
    """The input pixel, of `size`, that each of `count` output pixels along an axis is."""
    align, half = _placement(node)
    index = torch.arange(count, dtype=torch.float32, device=device)
    place = (index + 0.5 if half else index) * _scale(size, count, align)
    return (_round_half_away(place) if align else place.floor()).long().clamp_(max=size - 1)


def _round_half_away(place: Tensor) -> Tensor:
    """Rounds a half away from zero, as C does; places here are not negative."""
    return (place + 0.5).floor()


def cubic_weights(node: Node, size: int, count: int, device: torch.device) -> Tensor:
    """The weight of every input pixel for every output pixel, of shape (count, size).

    With half_pixel_centers, TensorFlow uses Keys' coefficient -0.5 and leaves pixels outside of the image out of the
    average; otherwise -0.75, and repeats the pixels at the border.
    """
    align, half = _placement(node)
    a = -0.5 if half else -0.75
    place = _places(size, count, align, half, device)
    first = place.floor()
    step = ((place - first) * _CUBIC_STEPS).round() / _CUBIC_STEPS
    distance = torch.stack((step + 1, step, 1 - step, 2 - step), -1)
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    weights = torch.where(distance <= 1, near, far)
    pixels = first.long()[:, None] + torch.arange(-1, 3, device=device)
    inside = pixels.clamp(0, size - 1)
    if half:
        weights = torch.where(pixels == inside, weights, 0.0)
        total = weights.sum(-1, keepdim=True)
        weights = torch.where(total.abs() > 1e-7, weights / total, weights)
    hits = inside[:, :, None] == torch.arange(size, device=device)
    return (weights[:, :, None] * hits).sum(1)


def _crop_places(start: Tensor, end: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Places of the pixels of each crop along an axis, of shape (boxes, count), and which of them are in the image."""
    last = size - 1
    if count > 1:
        scale = divided((end - start) * last, count - 1)  # otherwise the last pixel may lie outside of the image
        index = torch.arange(count, dtype=torch.float32, device=start.device)
        place = (start * last)[:, None] + index * scale[:, None]
    else:
        place = (0.5 * (start + end) * last)[:, None]
    return place, (place >= 0) & (place <= last)


@lowering("RGBToHSV")
def rgb_to_hsv(node: Node, images: Tensor) -> Tensor:
    """Hue, saturation and value, each in [0, 1] for colors in [0, 1]."""
    hue, low, high = _hue(images)
    return torch.stack((hue, _saturation(low, high), high), -1)


@lowering("HSVToRGB")
def hsv_to_rgb(node: Node, images: Tensor) -> Tensor:
    """Red, green and blue of hue, saturation and value."""
    return _colors(*images.unbind(-1))


@lowering("AdjustHue")
def adjust_hue(node: Node, images: Tensor, delta: Tensor) -> Tensor:
    """The hue turned by `delta` of the wheel; the largest and the smallest of the three colors stay."""
    colors = images.to(torch.float32)
    hue, low, high = _hue(colors)
    hue = torch.remainder(hue + delta, 1)
    return (low[..., None] + (high - low)[..., None] * _wheel(hue)).to(images.dtype)


@lowering("AdjustSaturation")
def adjust_saturation(node: Node, images: Tensor, scale: Tensor) -> Tensor:
    """The saturation times `scale`, within [0, 1]."""
    colors = images.to(torch.float32)
    hue, low, high = _hue(colors)
    saturation = torch.clamp(_saturation(low, high) * scale, 0, 1)
    return _colors(hue, saturation, high).to(images.dtype)


@lowering("AdjustContrastv2")
def adjust_contrast(node: Node, images: Tensor, factor: Tensor) -> Tensor:
    """The distance to each channel's mean over height and width, times `factor`."""
    colors = images.to(torch.float32)
    mean = colors.mean((-3, -2), keepdim=True)
    return ((colors - mean) * factor + mean).to(images.dtype)


def _hue(colors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue in [0, 1), 0 for gray, and the smallest and the largest color."""
    red, green, blue = colors.unbind(-1)
    low, high = colors.amin(-1), colors.amax(-1)
    span = 6 * (high - low)
    hue = torch.where(
        red == high,
        (green - blue) / span,
        torch.where(green == high, (blue - red) / span + 2 / 6, (red - green) / span + 4 / 6),
    )
    hue = torch.where(high > low, hue, 0)
    return torch.where(hue < 0, hue + 1, hue), low, high


def _saturation(low: Tensor, high: Tensor) -> Tensor:
    """Saturation of the smallest and the largest color; 0 for black."""
    return torch.where(high > 0, (high - low) / high, 0)


def _colors(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Red, green and blue, on a new last axis."""
    return (1 - saturation[..., None] * (1 - _wheel(hue))) * value[..., None]


def _wheel(hue: Tensor) -> Tensor:
    """Share of its three colors that a hue has, each in [0, 1]."""
    turn = 6 * hue
    parts = ((turn - 3).abs() - 1, 2 - (turn - 2).abs(), 2 - (turn - 4).abs())
    return torch.stack(parts, -1).clamp(0, 1)


@lowering("ExtractImagePatches")
def extract_patches(node: Node, images: Tensor) -> Tensor:
    """Every window's pixels side by side in the channels; zeros where a window hangs over the image."""
    kernel = spatial(node, node.attrs["ksizes"], "ksizes")
    found = _patches(node, images, kernel, node.attrs["strides"], node.attrs["rates"], 0)
    return found.permute(0, 1, 2, 4, 5, 3).reshape(*found.shape[:3], -1)


@lowering("Dilation2D")
def dilation(node: Node, images: Tensor, filter: Tensor) -> Tensor:
    """The largest sum of a pixel and the filter's number for it in each window, by channel."""
    if not images.is_floating_point():
        raise Unsupported(f"Dilation2D {node.name}: only of floats")
    lowest = torch.finfo(images.dtype).min
    found = _patches(node, images, filter.shape[:2], node.attrs["strides"], node.attrs["rates"], lowest)
    return (found + filter.permute(2, 0, 1)).amax((-2, -1))


def _patches(
    node: Node, images: Tensor, kernel: tuple[int, ...], strides: tuple[int, ...], rates: tuple[int, ...], fill: float
) -> Tensor:
    """Windows as (batch, height, width, channels, window's height, window's width): a view, of the padded images where there is padding."""
    steps, gaps = spatial(node, strides, "strides"), spatial(node, rates, "rates")
    down, across = windows(node, images.shape[1:3], kernel, steps, gaps)
    pads = (0, 0, max(across.before, 0), max(across.after, 0), max(down.before, 0), max(down.after, 0))
    padded = F.pad(images, pads, value=fill) if any(pads) else images
    found = padded.unfold(1, down.reach, down.stride).unfold(2, across.reach, across.stride)
    return found[..., :: down.dilation, :: across.dilation]


@lowering("ImageProjectiveTransformV2", "ImageProjectiveTransformV3", static=(2,))
def image_projective_transform(
    node: Node, images: Tensor, transforms: Tensor, output_shape: np.ndarray, *fill: Tensor
) -> Tensor:
    """Images seen through projections: each output pixel is read where its row of `transforms` puts it."""
    height, width = integers(output_shape)
    rows = torch.arange(height, dtype=torch.float32, device=images.device)[:, None]
    columns = torch.arange(width, dtype=torch.float32, device=images.device)
    by = transforms.to(torch.float32).reshape(-1, 8, 1, 1).unbind(1)
    depth = by[6] * columns + by[7] * rows + 1
    somewhere, away = depth != 0, depth.where(depth != 0, 1)
    x = _folded(node, (by[0] * columns + by[1] * rows + by[2]) / away, images.shape[2])
    y = _folded(node, (by[3] * columns + by[4] * rows + by[5]) / away, images.shape[1])
    value = fill[0].to(images.dtype) if fill else images.new_zeros(())
    batch = torch.arange(images.shape[0], device=images.device)[:, None, None]

    def read(row: Tensor, column: Tensor) -> Tensor:
        inside = (row >= 0) & (row < images.shape[1]) & (column >= 0) & (column < images.shape[2]) & somewhere
        pixels = images[batch, row.where(inside, 0).long(), column.where(inside, 0).long()]  # outside may be NaN
        return torch.where(inside[..., None], pixels, value)

    if node.attrs["interpolation"] == "NEAREST":
        return read(_round_half_away(y), _round_half_away(x))
    left, top = x.floor(), y.floor()
    before, after = (left + 1 - x)[..., None], (x - left)[..., None]
    upper = before * read(top, left).float() + after * read(top, left + 1).float()
    lower = before * read(top + 1, left).float() + after * read(top + 1, left + 1).float()
    seen = (top + 1 - y)[..., None] * upper + (y - top)[..., None] * lower
    return torch.where(somewhere[..., None], seen, value.float()).to(images.dtype)


def _folded(node: Node, place: Tensor, size: int) -> Tensor:
    """Place in an image of one outside of it, by `fill_mode`."""
    mode = node.get("fill_mode", "CONSTANT")
    if mode == "CONSTANT":
        return place
    if mode == "REFLECT":
        turned = place - 2 * size * torch.floor(place / (2 * size))
        place = torch.where(turned >= size, 2 * size - turned - 1, turned)
    elif mode == "WRAP":
        # TensorFlow counts turns by the last pixel, and goes on by the size.
        last = max(size - 1, 1)
        place = torch.where(
            place < 0,
            place + size * (torch.trunc(-place / last) + 1),
            torch.where(place > size - 1, place - size * torch.trunc(place / last), place),
        )
    return place.clamp(0, size - 1)

"""Images: read from untrusted bytes within bounds, and prepared for CLIP as its own processor does, without torch."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from hardpoint.errors import ConfigError, VLLMValidationError, reason_of

# An image is this large at most: 192 MiB in memory. A small file may claim to be larger.
MAX_PIXELS = 1 << 26
# What is read. Formats that run other programs or scripts are not among them.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_MODES = ("RGB", "L")
_MAX_SIDE = 1 << 13
_MAX_RATIO = 200


def pillow() -> ModuleType:
    """The imaging package; ConfigError naming the extra where it is not installed."""
    try:
        from PIL import Image  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError(
            "images need the package pillow, which is not installed",
            code="vision-pillow",
            fix="pip install 'hardpoint[vision]'",
        ) from None
    return Image


def read_image(data: bytes, options: Mapping[str, Any] | None = None) -> Any:
    """Decode an image file.

    options  image_mode ("RGB"), rgba_background_color ([255, 255, 255], what shows through transparent pixels)
    ValueError saying what is wrong with it.
    """
    image_module = pillow()
    try:
        image = image_module.open(io.BytesIO(data), formats=_FORMATS)
    except (SyntaxError, OSError, ValueError) as error:
        raise ValueError(f"it is no image of a known format ({', '.join(_FORMATS)})") from error
    except Exception as error:
        # Pillow's own limit, as an error or as a warning that somebody made an error.
        raise ValueError(f"it cannot be read: {error}") from error
    _check_size(image)
    try:
        image.load()
        return convert(_upright(image), options)
    except Exception as error:
        raise ValueError(f"it is damaged: {error}") from error


def _upright(image: Any) -> Any:
    from PIL import ImageOps  # noqa: PLC0415 - an extra

    return ImageOps.exif_transpose(image)


def _check_size(image: Any) -> None:
    width, height = image.size
    if not width or not height or width * height > MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels, and {MAX_PIXELS} in all are allowed")


def convert(image: Any, options: Mapping[str, Any] | None = None) -> Any:
    """An image in the wanted mode; transparent pixels show the background."""
    options = options or {}
    mode = options.get("image_mode", "RGB")
    if mode not in _MODES:
        raise ValueError(f"image_mode is {mode!r}: expected {' or '.join(_MODES)}")
    if image.mode == "RGBA" or (image.mode == "P" and "transparency" in image.info):
        background = tuple(options.get("rgba_background_color", (255, 255, 255)))
        if len(background) != 3 or not all(isinstance(part, int) and 0 <= part < 256 for part in background):
            raise ValueError("rgba_background_color must be three numbers from 0 to 255")
        image = image.convert("RGBA")
        ground = pillow().new("RGB", image.size, background)
        ground.paste(image, mask=image.getchannel("A"))
        image = ground
    return image if image.mode == mode else image.convert(mode)


def as_image(item: Any, options: Mapping[str, Any] | None = None) -> Any:
    """An image from what a script may give: an image of pillow, an array, or the bytes of a file.

    Arrays are [height, width, 3] of uint8, or of floats from 0 to 1. ValueError for anything else.
    """
    if isinstance(item, bytes):
        return read_image(item, options)
    if isinstance(item, pillow().Image):
        _check_size(item)
        return convert(item, options)
    if type(item).__module__ == "torch":
        item = item.detach().cpu().numpy()
    if isinstance(item, np.ndarray):
        return _from_array(item, options)
    raise ValueError(f"an image must be an image of pillow, an array or bytes, not {type(item).__name__}")


def _from_array(item: np.ndarray, options: Mapping[str, Any] | None) -> Any:
    if item.ndim == 3 and item.shape[0] == 3 and item.shape[-1] != 3:
        item = np.moveaxis(item, 0, -1)
    if item.ndim != 3 or item.shape[-1] != 3 or item.size > 3 * MAX_PIXELS or not item.size:
        raise ValueError(f"an array of shape {item.shape} is no image: expected [height, width, 3]")
    if item.dtype.kind == "f":
        if not (np.isfinite(item).all() and item.min() >= 0 and item.max() <= 1):
            raise ValueError("an image of floats must have values from 0 to 1")
        item = np.rint(item * 255)
    elif item.dtype != np.uint8:
        raise ValueError(f"an image of {item.dtype} is not known: expected uint8, or floats from 0 to 1")
    return convert(pillow().fromarray(np.ascontiguousarray(item.astype(np.uint8))), options)


class ClipImageProcessor:
    """CLIP's preparation: resize, cut the middle out, scale, normalise.

    Its options are those of a preprocessor_config.json. ValueError for one that makes no sense.
    """

    DEFAULTS: Mapping[str, Any] = {
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": 224},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "do_pad": False,
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        chosen = {**self.DEFAULTS, **{key: value for key, value in options.items() if value is not None}}
        self.resizes, self.crops = bool(chosen["do_resize"]), bool(chosen["do_center_crop"])
        self.rescales, self.normalizes = bool(chosen["do_rescale"]), bool(chosen["do_normalize"])
        self.pads = bool(chosen["do_pad"])
        self.size = _size(chosen["size"], "size", edge=True)
        self.crop_size = _size(chosen["crop_size"], "crop_size", edge=False)
        self.resample = _whole(chosen["resample"], "resample", 5)
        self.factor = _numbers(chosen["rescale_factor"], "rescale_factor", 1)[0]
        self.mean = _numbers(chosen["image_mean"], "image_mean", 3)
        self.std = _numbers(chosen["image_std"], "image_std", 3)
        if not (self.std > 0).all():
            raise ValueError("image_std must be positive")

    def output_size(self) -> tuple[int, int] | None:
        """(height, width) of every result; None where it depends on the image."""
        if self.crops:
            return self.crop_size["height"], self.crop_size["width"]
        if self.resizes and "height" in self.size:
            return self.size["height"], self.size["width"]
        if self.resizes and self.pads:
            return self.size["shortest_edge"], self.size["shortest_edge"]
        return None

    def __call__(self, image: Any) -> np.ndarray:
        """An RGB image -> [3, height, width] float32."""
        image = convert(image)
        if self.pads:
            image = self._padded(image)
        if self.resizes:
            image = image.resize(self._target(*image.size), resample=self.resample)
        pixels = np.asarray(image)
        if self.crops:
            pixels = _center(pixels, self.crop_size["height"], self.crop_size["width"])
        found = pixels.astype(np.float32)
        if self.rescales:
            found = (pixels * self.factor).astype(np.float32)
        if self.normalizes:
            found = (found - self.mean) / self.std
        return np.ascontiguousarray(np.moveaxis(found, -1, 0), dtype=np.float32)

    def _padded(self, image: Any) -> Any:
        """A square with the image in the middle, on the mean colour."""
        width, height = image.size
        side = max(width, height)
        if side == min(width, height):
            return image
        if side * side > MAX_PIXELS:
            raise ValueError(f"an image of {width} x {height} pixels is too large to be made a square")
        ground = pillow().new("RGB", (side, side), tuple(int(part * 255) for part in self.mean))
        ground.paste(image, ((side - width) // 2, (side - height) // 2))
        return ground

    def _target(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) to resize to."""
        if "height" in self.size:
            return self.size["width"], self.size["height"]
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise ValueError(f"an image of {width} x {height} pixels is too narrow to be resized")
        edge = self.size["shortest_edge"]
        if width <= height:
            return edge, int(edge * height / width)
        return int(edge * width / height), edge


def _center(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle of [h, w, 3], with black around an image that is smaller."""
    h, w = pixels.shape[:2]
    if h < height or w < width:
        tall, wide = max(h, height), max(w, width)
        whole = np.zeros((tall, wide, pixels.shape[2]), pixels.dtype)
        top, left = math.ceil((tall - h) / 2), math.ceil((wide - w) / 2)
        whole[top : top + h, left : left + w] = pixels
        pixels, h, w = whole, tall, wide
    top, left = (h - height) // 2, (w - width) // 2
    return pixels[top : top + height, left : left + width]


def _size(value: Any, name: str, edge: bool) -> dict[str, int]:
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"shortest_edge": value} if edge else {"height": value, "width": value}
    if not isinstance(value, Mapping) or set(value) not in ({"height", "width"}, {"shortest_edge"} if edge else set()):
        raise ValueError(f"{name} is {value!r}: expected a number or height and width")
    return {key: _whole(side, name, _MAX_SIDE, least=1) for key, side in value.items()}


def _whole(value: Any, name: str, most: int, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}: expected a whole number from {least} to {most}")
    return value


def _numbers(value: Any, name: str, count: int) -> np.ndarray:
    listed = value if isinstance(value, (list, tuple)) else [value] * count
    usable = all(isinstance(part, (int, float)) and not isinstance(part, bool) for part in listed)
    if len(listed) != count or not usable or not all(math.isfinite(part) for part in listed):
        raise ValueError(f"{name} is {value!r}: expected {count} number(s)")
    return np.array(listed, np.float64 if count == 1 else np.float32)


def too_bad(what: str, where: str, error: ValueError) -> VLLMValidationError:
    """The answer to a request some of whose media cannot be used, with what can be done about it."""
    fix = f" ({error.fix})" if isinstance(error, ConfigError) and error.fix else ""
    return VLLMValidationError(f"{what} cannot be used: {reason_of(error)}{fix}", parameter=where)

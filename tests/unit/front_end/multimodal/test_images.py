"""Images from untrusted bytes, and CLIP's preparation held against transformers'."""

from __future__ import annotations

import io
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from hardpoint.errors import ConfigError
from hardpoint.front_end.multimodal import images
from hardpoint.front_end.multimodal.images import ClipImageProcessor, as_image, read_image
from tiny_llava import picture


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("size", [(40, 30), (30, 41), (8, 9), (33, 33), (200, 20)])
@pytest.mark.parametrize(
    "options",
    [
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
        {"size": {"height": 12, "width": 20}, "crop_size": {"height": 16, "width": 16}},
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, "do_normalize": False},
        {"do_resize": False, "crop_size": {"height": 16, "width": 16}, "do_rescale": False},
    ],
)
def test_preparation_is_that_of_transformers(size, options):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = picture(5, *size)
    expected = CLIPImageProcessorPil(**options)(image, return_tensors="np")["pixel_values"][0]
    found = ClipImageProcessor(options)(image)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_padding_is_that_of_transformers():
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    options = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, "do_pad": True}
    for size in ((40, 30), (30, 41)):
        image = picture(6, *size)
        expected = LlavaImageProcessorPil(**options)(image, return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(ClipImageProcessor(options)(image), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": {"shortest_edge": 0}}, "size"),
        ({"size": {"longest_edge": 4}}, "size"),
        ({"crop_size": 1 << 20}, "crop_size"),
        ({"resample": 77}, "resample"),
        ({"image_std": [0, 1, 1]}, "image_std"),
        ({"image_mean": [1, 2]}, "image_mean"),
        ({"rescale_factor": float("nan")}, "rescale_factor"),
    ],
)
def test_options_that_make_no_sense(options, text):
    with pytest.raises(ValueError, match=text):
        ClipImageProcessor(options)


def test_reading_brings_every_kind_to_rgb():
    image = picture(1)
    assert np.array_equal(np.asarray(read_image(encoded(image))), np.asarray(image))
    clear = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert read_image(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)
    assert read_image(encoded(clear), {"rgba_background_color": [1, 2, 3]}).getpixel((0, 0)) == (1, 2, 3)
    for mode in ("L", "P", "1", "CMYK"):
        assert read_image(encoded(image.convert(mode), "TIFF")).mode == "RGB"
    turned = Image.new("RGB", (4, 2))
    exif = turned.getexif()
    exif[0x0112] = 6  # the camera was held upright
    assert read_image(encoded(turned, "JPEG", exif=exif)).size == (2, 4)


def claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is large."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "no image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image"),
        (encoded(picture(1))[:60], "damaged|no image"),
        (claiming(9000, 9000), "81000000|9000 x 9000"),
        (claiming(100_000, 100_000), "cannot be read|pixels"),
    ],
)
def test_bad_files_are_refused_in_words(data, text):
    with pytest.raises(ValueError, match=text):
        read_image(data)


@pytest.mark.parametrize(
    "item", ["text", 5, np.zeros((2, 2)), np.zeros((4, 4, 3), np.int64), np.full((4, 4, 3), 2.0), np.zeros((0, 4, 3))]
)
def test_what_is_no_image(item):
    with pytest.raises(ValueError, match="image"):
        as_image(item)


def test_arrays_are_images():
    pixels = np.asarray(picture(2))
    assert np.array_equal(np.asarray(as_image(pixels)), pixels)
    assert np.array_equal(np.asarray(as_image(pixels / 255.0)), pixels)
    assert np.array_equal(np.asarray(as_image(np.moveaxis(pixels, -1, 0))), pixels)


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError) as caught:
        images.pillow()
    assert "hardpoint[vision]" in str(caught.value.fix)

"""Grey images of more than 8 bits per sample, as a person sees them: scaled from the file's own black and white.

Pillow converts such modes to RGB by clipping at 255, so a 16-bit image silently becomes white and a float image black.
The value of white follows from the file if its format defines it:

========================================  =====================================================================
PGM with a maxval above 255               maxval; Pillow already scales the samples to 0..65535 (mode ``I``)
PNG, JPEG 2000, AVIF                      the full range; Pillow already scales fewer bits to 0..65535
unsigned TIFF of 12 or 16 bits            ``2**BitsPerSample - 1`` (TIFF 6.0, PhotometricInterpretation)
float TIFF, PFM                           1.0, as ImageMagick, scikit-image and Matplotlib read it; only if every
                                          sample is between 0 and 1
signed TIFF, TIFF of 32-bit integers      no value that readers agree on (counts, labels, depths); refused
========================================  =====================================================================

Colour of 16 bits per channel needs nothing here: Pillow keeps the upper 8 bits of each channel.

Transparent pixels are shown on white. Pillow's conversion to RGB drops the alpha channel, so what is transparent gets
the colour that the file happens to hold there, mostly black: a black drawing on transparency becomes all black.
"""

from typing import NamedTuple

from PIL import Image

from energon_packing.errors import SampleRejected

_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_SIGNED = 2
_WAY_OUT = "save it with 8 or 16 unsigned bits per sample"


class GreyRange(NamedTuple):
    """What the samples of a deep grey image mean: the value of full intensity (no intensity is 0), and whether 0 is
    shown white instead (PhotometricInterpretation 0 of TIFF)."""

    white: float
    inverted: bool = False


def grey_range(image: Image.Image) -> GreyRange | None:
    """Returns the range of an opened image's samples, from its header alone; None for 8 bits, which are not scaled.
    ``unsupported_depth`` if the format does not define which samples are black and white."""
    white: float | None = {"F": 1.0, "I": None}.get(image.mode, 65535.0 if image.mode in _SIXTEEN_BITS else 0.0)
    inverted = False
    tags = getattr(image, "tag_v2", None)
    if image.format == "TIFF" and tags is not None:
        if _SIGNED in tags.get(_SAMPLE_FORMAT, (1,)):
            raise _undefined("signed TIFF samples")
        if image.mode in _SIXTEEN_BITS:
            white = float(2 ** int(tags.get(_BITS_PER_SAMPLE, (16,))[0]) - 1)
        inverted = tags.get(_PHOTOMETRIC, 0) == 0
    elif image.mode == "I" and image.format in ("PPM", "PNG"):  # PNG: in releases of Pillow before 11
        white = 65535.0
    if white is None:
        raise _undefined(f"32-bit integers in {image.format}")
    return GreyRange(white, inverted) if white else None


def _undefined(samples: str) -> SampleRejected:
    return SampleRejected("unsupported_depth", f"{samples} have no defined black and white; {_WAY_OUT}")


def is_transparent(image: Image.Image) -> bool:
    """Whether a decoded image has a pixel that is not opaque."""
    if not image.has_transparency_data:
        return False
    if image.mode in (*_SIXTEEN_BITS, "I"):  # a PNG that names one value as transparent
        import numpy as np

        return bool((np.asarray(image) == image.info["transparency"]).any())
    return bool(image.convert("RGBA").getchannel("A").getextrema()[0] < 255)  # type: ignore[operator]


def to_rgb(image: Image.Image, grey: GreyRange | None, *, on_white: bool = True) -> Image.Image:
    """Returns a decoded image of any mode, or a part of it, as RGB, by the `grey_range` of the opened file. If
    ``on_white`` is false, the alpha of transparent pixels is dropped. Raises SampleRejected: ``unsupported_depth`` for
    float samples outside 0 to 1; ValueError: Pillow cannot convert the mode to RGB."""
    if grey is not None:
        import numpy as np  # here, because commands that only read headers need no arrays

        samples = np.asarray(image)
        if samples.dtype.kind == "f":
            low, high = float(samples.min()), float(samples.max())
            if not (low >= 0.0 and high <= 1.0):  # both are NaN if a sample is
                shown = "that are not numbers" if low != low else f"from {low:g} to {high:g}"
                why = "only 0 (black) to 1 (white) has a defined meaning: scale them, or " + _WAY_OUT
                raise SampleRejected("unsupported_depth", f"float samples {shown}; {why}")
            levels = np.rint(samples * np.float32(255)).astype(np.uint8)
        else:
            levels = (samples.astype(np.uint32) * 255 // int(grey.white)).astype(np.uint8)
            if on_white and "transparency" in image.info:
                levels[samples == image.info["transparency"]] = 255
        image = Image.fromarray(255 - levels if grey.inverted else levels)
    elif on_white and image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")

"""Reading image, video and tensor files that strangers wrote; how large what they hold may be."""

from energon_packing.errors import SampleRejected

DEFAULT_MAX_PIXELS = 89_478_485
"""Most pixels of one image or video frame: Pillow's own limit (a quarter of a GiB at three bytes per pixel)."""


def check_decoded_bytes(frames: int, width: int, height: int, max_bytes: int | None) -> None:
    """Refuses images or frames that would take more than ``max_bytes`` at 3 per pixel, as ``media_too_large``."""
    needed = 3 * frames * width * height
    if max_bytes is not None and needed > max_bytes:
        left = f"only {max_bytes} of encoder.max_decoded_bytes are left"
        raise SampleRejected("media_too_large", f"{frames} x {width}x{height} pixels take {needed} bytes, but {left}")

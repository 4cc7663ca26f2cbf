"""The default limit of pixels, apart from the libraries that decode."""

DEFAULT_MAX_PIXELS = 89_478_485
"""Most pixels of one image or video frame: Pillow's own limit (a quarter of a GiB at three bytes per pixel)."""

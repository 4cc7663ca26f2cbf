"""Text-to-video data, which is no conversation."""

from energon_packing.convert.text_to_video import LAYOUT as LAYOUT

"""Text-to-video data, which is no conversation."""

from energon_packing.wan.convert import LAYOUT as LAYOUT

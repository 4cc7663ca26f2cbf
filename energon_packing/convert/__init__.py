"""Conversation files -> Energon data set. Importing this loads neither torch nor Energon."""

from energon_packing.convert.config import ConvertConfig
from energon_packing.convert.layout import dataset_entry
from energon_packing.convert.pipeline import convert
from energon_packing.convert.report import ConversionReport

__all__ = ["ConversionReport", "ConvertConfig", "convert", "dataset_entry"]

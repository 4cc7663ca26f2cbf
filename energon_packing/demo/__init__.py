"""The embedded default: a processor that is shipped and a data set that is made, for a demo without downloads."""

from energon_packing.demo.generate import make_data
from energon_packing.demo.processor import PROCESSORS, processor_path

__all__ = ["PROCESSORS", "make_data", "processor_path"]

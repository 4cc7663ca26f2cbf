"""The embedded default: a processor directory that is shipped, and a data set that is made, for a demo without downloads."""

from energon_packing.demo.processor import PROCESSORS, processor_path

__all__ = ["PROCESSORS", "processor_path"]

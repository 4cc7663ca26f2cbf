"""The built-in demo, which needs no downloads: processors are shipped, and a data set is generated."""

from energon_packing.demo.generate import PROCESSORS, make_data, processor_path

__all__ = ["PROCESSORS", "make_data", "processor_path"]

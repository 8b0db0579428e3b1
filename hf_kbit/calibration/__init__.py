"""Quantizing with a little data: which errors of a weight count is told by what goes through its layer."""

from hf_kbit.calibration.layerwise import calibrate

__all__ = ["calibrate"]

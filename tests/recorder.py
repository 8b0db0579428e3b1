"""What calibration finds out, kept in the place of what it does with it."""

import torch

from hf_kbit.calibration import weighted


class Recorder:
    """A solver that quantizes anyhow, and a drift that keeps what it is given, in the order of the calls."""

    def __init__(self, diagonal: bool):
        self.DIAGONAL, self.moments = diagonal, []

    def solve(self, weight, moments, codebook, signed):
        return weighted.solve(weight, torch.ones(weight.shape[1]), codebook, signed)

    def aim(self, weight, moments):
        self.moments.append(moments)
        return weight

"""What errors of a trellis cost the model, layer by layer: without data, or what error feedback leaves of it."""

import math

import torch

from hf_kbit.calibration import trellis
from hf_kbit.calibration.moments import add_products
from hf_kbit.calibration.sensitivity import without_peaks
from hf_kbit.format.reference import matrices
from hf_kbit.plan.config import KbitConfig
from hf_kbit.weight.packing import Recipe
from hf_kbit.weight.trellis_packing import scales_of

# Squared errors of Gaussian weights of variance 1, as rotations make of a weight, by the width of a trellis.
ERRORS = {1: 0.277, 2: 0.0686, 3: 0.0175, 4: 4.47e-3, 5: 1.16e-3, 6: 3.04e-4, 7: 8.11e-5, 8: 2.12e-5}
FEATURES = 512  # of a side, whose moments say what feedback leaves; with 256 or all, widths are nearly the same


class TrellisCosts:
    """Of one layer, or of all experts of a projection, for a weight ``[N, K]`` or ``[E, N, K]``.

    Rotations leave errors of variance 1 alike, and scales of both sides multiply them, whatever the width. So nothing
    is encoded, which would take minutes. ``feedback``: whether ``trellis.solve`` is to follow, which takes most off.
    """

    def __init__(self, weight: torch.Tensor, config: KbitConfig, feedback: bool):
        decoding = config.decoding(config.widths[0], weight.shape, is_table=False)
        found = [scales_of(each, decoding, Recipe().balances) for each in matrices(weight)]
        rows, columns = (torch.stack([getattr(each, of).float() for each in found]) for of in ("svh", "suh"))
        *_, n, k = weight.shape
        self.rows, self.columns, self.total = rows[:, :n].square(), columns[:, :k].square(), 0.0
        self.widths, self.feedback = config.widths, feedback
        self.inputs = _Side(k, columns, decoding.block) if feedback else None
        # Experts have no feedback along outputs.
        self.outputs = _Side(n, rows, decoding.block) if feedback and weight.ndim == 2 else None

    def add(self, fisher: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds those of some tokens: squared gradients of the weight, in its shape; what the layer was given, ``[...,
        rows, K]``; and the gradient of what it made of that, ``[sequences, rows, N]``."""
        scales = self.rows.to(fisher.device), self.columns.to(fisher.device)
        self.total += sum(
            (n @ own @ k).item() for n, own, k in zip(scales[0], matrices(fisher), scales[1], strict=True)
        )
        if self.inputs:
            self.inputs.add(x.flatten(0, -2))
        if self.outputs:
            gradient = gradient.float()
            self.outputs.add(without_peaks(gradient, gradient.square().sum(-1)))

    def of_widths(self) -> dict[int, float]:
        """In nats, for all of the tokens; NaN or infinite where gradients are."""
        common, sides = self.total / 2, ((self.inputs, trellis.DAMPING), (self.outputs, trellis.OUTPUT_DAMPING))
        for side, damping in sides if math.isfinite(common) else ():
            if side:
                common *= trellis.left(side.moments, side.scales, side.block, damping)
        return {width: common * ERRORS[width] for width in self.widths}


class _Side:
    """Second moments of some features of one side, float32 on the CPU: of whole blocks, evenly spread over it."""

    def __init__(self, size: int, scales: torch.Tensor, block: int):
        count = scales.shape[1] // block
        chosen = torch.linspace(0, count - 1, min(count, max(FEATURES // block, 1))).round().long()
        places = (chosen[:, None] * block + torch.arange(block)).flatten()
        self.scales, self.block = scales.square().mean(0).sqrt().cpu()[places], block
        self.places = places[places < size]  # what is missing is the padding, at the end
        self.moments = torch.zeros(len(self.places), len(self.places))

    def add(self, rows: torch.Tensor) -> None:
        own = rows[:, self.places.to(rows.device)].float()
        found = own.new_zeros(self.moments.shape)
        add_products(found, own, own)
        self.moments += found.cpu()

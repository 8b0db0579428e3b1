"""KbitProduct: what layers have in common that multiply by a packed weight, and may take 8-bit inputs."""

import torch
from torch.compiler import is_dynamo_compiling

from hf_kbit.nn.weight import KbitWeight
from hf_kbit.ops import int8_inverses, product_int8


class KbitProduct(KbitWeight):
    """A layer that multiplies by its weight. Its inputs stay in 16 bits, or are rounded to 8 for the product.

    Attributes:
        inputs: ``"int8"`` has the layer round its inputs to 8 bits, if its weight is transformed, and outside of
            training: in ``eval()`` mode, where no gradient is wanted, and x is not float64. None leaves them in 16
            bits. ``hf_kbit.set_inputs`` sets it for all layers of a model.
    """

    inputs: str | None = None

    def take_inputs(self, inputs: str | None) -> None:
        """Sets ``inputs``, if the weight is transformed, and finds what products need for it."""
        self.inputs = None if self.decoding.keeps_inputs else inputs
        if self.inputs and "columns" in self.parts:
            self.find_inverses(self.parts)  # so that compiled code has them too

    def product_int8(self, x: torch.Tensor, parts: dict, bias: torch.Tensor | None) -> torch.Tensor:
        """The product of a matrix with 8-bit inputs, if it has one (``Decoding.keeps_inputs``)."""
        columns = parts.get("columns")
        if columns is None:
            return parts["kind"].product_int8(x, parts, bias)
        packed = parts["words"], parts["absmax"], parts["codebook"]
        return product_int8(x, *packed, bias, parts["matrix"][0], columns, self.find_inverses(parts))

    def find_inverses(self, parts: dict) -> torch.Tensor | None:
        """What the weight's rows are multiplied by for 8-bit inputs, kept for the next product; None where it is not
        to be kept, and each product finds it."""
        if (found := parts.get("inverses")) is None and not is_dynamo_compiling():
            if parts["words"].is_cuda and torch.cuda.is_current_stream_capturing():
                return None  # a graph's memory is not to be kept
            how = parts["codebook"], parts["matrix"]
            with torch.inference_mode(False):  # other products may be outside of it
                if self.lead:
                    matrices = zip(parts["words"], parts["absmax"], strict=True)
                    found = torch.stack([int8_inverses(*matrix, *how) for matrix in matrices])
                else:
                    found = int8_inverses(parts["words"], parts["absmax"], *how)
            parts["inverses"] = found
        return found

"""KbitLinear: an ``nn.Linear`` whose weight is quantized and frozen."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from transformers.pytorch_utils import Conv1D

from hf_kbit.format.decoding import DEFAULT_TRANSFORM
from hf_kbit.nn.product import KbitProduct
from hf_kbit.weight.packing import DEFAULT_CODEBOOK, DEFAULT_SCALE


class KbitLinear(KbitProduct, nn.Linear):
    """A linear layer with a frozen weight of 2, 3, 4 or 5 bits: ``y = x @ W.T + bias``.

    It is an ``nn.Linear``. Its ``weight`` is a ``KbitTensor`` ``[N, K]``, frozen; its ``bias`` is floating ``[N]`` or
    None, and trainable.

    Args:
        in_features: K, any size of 1 or more.
        out_features: N, any size of 1 or more.
        bias: whether there is a bias.
        bits: 2 to 5.
        codebook: name or table of ``2**bits`` numbers (``codebooks.resolve``).
        exponent: power of two that multiplies the levels.
        device: of the parameters and the codebook.
        dtype: of the bias, and of the weight that the layer stands for: what ``dequantize`` gives.
        scale: how ``load_dense`` finds the scale of a block: ``"search"``, by the squared error, or ``"absmax"``, from
            its largest magnitude (``hf_kbit.ops.quantize``).
        transform: what ``load_dense`` does to a weight first: ``"rotated"`` or ``"none"`` (``KbitConfig``).

    Attributes:
        inputs: as of ``KbitProduct``.

    A new layer holds zeros and so computes its bias; load a state dict, or use ``from_linear``.

    Raises:
        ValueError: bits, codebook or a size is out of range.

    >>> layer = KbitLinear.from_linear(nn.Linear(100, 64), bits=3)
    >>> layer
    KbitLinear(in_features=100, out_features=64, bias=True, bits=3)
    >>> layer(torch.randn(2, 7, 100)).shape
    torch.Size([2, 7, 64])
    """

    plain = nn.Linear
    # Tensor parallelism in Transformers then runs the forward on local shards, which the ops take.
    _hf_quantized_needs_local_tp = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        bits: int = 4,
        codebook: str | Iterable[float] = DEFAULT_CODEBOOK,
        exponent: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scale: str = DEFAULT_SCALE,
        transform: str = DEFAULT_TRANSFORM,
    ):
        sizes = {"in_features": in_features, "out_features": out_features}
        super().__init__(sizes, bits, codebook, exponent, device, dtype, scale, transform)
        own = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        bits: int = 4,
        codebook: str | Iterable[float] = DEFAULT_CODEBOOK,
        scale: str = DEFAULT_SCALE,
        transform: str = DEFAULT_TRANSFORM,
    ) -> "KbitLinear":
        """Quantizes an ``nn.Linear`` where it is; ``linear`` stays as it was, and its bias is shared.

        Args:
            linear: weight float32, float16 or bfloat16 ``[N, K]``.
            bits: 2 to 5.
            codebook: name or table of ``2**bits`` numbers.
            scale: ``"search"`` or ``"absmax"``.
            transform: ``"rotated"`` or ``"none"``.

        Raises:
            TypeError: the weight has another dtype.
            ValueError: bits or codebook is out of range, or the weight holds NaN or infinity.

        >>> KbitLinear.from_linear(nn.Linear(64, 64, bias=False), bits=2).weight
        KbitTensor(shape=(64, 64), dtype=torch.float32, device=cpu, bits=2)
        """
        shape = linear.in_features, linear.out_features
        layer = cls(
            *shape, False, bits, codebook, device="meta", dtype=linear.weight.dtype, scale=scale, transform=transform
        )
        layer.load_dense(linear.weight)
        layer.bias = linear.bias
        return layer.train(linear.training)

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A plain ``nn.Linear`` with the decoded weight and the same bias, on the same device."""
        weight = self.dequantize(dtype)
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(weight)
        linear.bias = None if self.bias is None else nn.Parameter(self.bias.to(weight.dtype))
        return linear.train(self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` floating ``[*, K]`` to ``[*, N]`` of the same dtype, or of autocast's where it is on.

        Raises:
            TypeError: ``x`` is no floating tensor.
            ValueError: its last size is not K.
        """
        # Straight from the dictionaries, and no conversion to the same dtype: for few tokens the host's time counts,
        # and nn.Module's look-ups are a good part of it.
        if is_dynamo_compiling():
            parts, bias = self.parts, self.bias
        else:
            own = self._parameters
            try:
                parts, bias = own["weight"].parts, own["bias"]
            except (AttributeError, KeyError):
                parts, bias = None, self.bias
            self.__dict__["parts"] = parts
        if parts is None:  # somebody has put a dense weight into its place, or a function that makes one
            return nn.functional.linear(x, self.weight, bias)
        # Under tensor parallelism a part of the weight, and x of the same part of K.
        width = parts["matrix"][1]
        try:
            if not x.is_floating_point() or x.shape[-1:] != (width,):
                self.refuse(x, width)
            if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
                x = x.to(torch.get_autocast_dtype(x.device.type))
            if bias is not None and bias.dtype != x.dtype:
                bias = bias.to(x.dtype)
            if self.inputs is None or self.training:
                return parts["kind"].product(x, parts, bias)
            return self.product_int8(x, parts, bias)
        except (TypeError, ValueError, RuntimeError) as error:
            self.fail(error)

    def reset_parameters(self) -> None:
        """Does nothing: a quantized weight has no random initialisation."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits if self.is_packed else None}"


class KbitConv1D(KbitLinear):
    """What GPT-2's ``Conv1D`` of Transformers becomes, in place: a linear layer that was ``[K, N]``."""

    plain = Conv1D
    transposed = True
    in_features = property(lambda self: self.nx)
    out_features = property(lambda self: self.nf)

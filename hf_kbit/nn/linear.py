"""KbitLinear: an ``nn.Linear`` whose weight is quantized and frozen."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from hf_kbit import _native, codebooks
from hf_kbit.format import absmax_shape, check_bits, layer_exponent, weight_shape
from hf_kbit.ops import gemm_op
from hf_kbit.refine import refine

SCALES = ("absmax", "search")
DEFAULT_CODEBOOK, DEFAULT_SCALE = "optimal", "search"  # made for each other


_LEFT_OUT = ContextVar("packed weights are left out of state dicts", default=False)


@contextmanager
def without_packed_weights() -> Iterator[None]:
    """State dicts made inside have no packed weights: for saving what a model has besides."""
    token = _LEFT_OUT.set(True)
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


def check_scale(scale: object) -> str:
    """Returns ``scale`` if it is one of ``SCALES``.

    Raises:
        ValueError: it is not.
    """
    if scale not in SCALES:
        raise ValueError(f"scale: found {scale!r}, expected one of {list(SCALES)}")
    return scale


class KbitLinear(nn.Linear):
    """A linear layer with a frozen weight of 2, 3, 4 or 5 bits: ``y = x @ W.T + bias``.

    It is an ``nn.Linear`` to ``isinstance``, but its parameters are the stored ones:

    - ``weight``: int32 bit-planes ``[N, B * bits]``, no gradient,
    - ``weight_absmax``: uint8 E4M4 scales ``[N, B]``, no gradient,
    - ``bias``: floating ``[N]`` or None; trainable.

    On a GPU the two hold the tiles that kernels read (``repack``): made once when the layer arrives there by ``to``,
    ``cuda``, quantizing or loading, and turned back when it moves away. What others see is in the stored form: its
    state dict (in CPU memory, so that saving takes no second copy on the GPU), pickles and copies.

    The float32 buffer ``codebook`` ``[2**bits]``, ``levels * 2**exponent``, is in no state dict; it is made again from
    ``levels`` and ``exponent`` whenever the module moves, so a cast to another dtype cannot round it.

    Args:
        in_features: K, any size of 1 or more.
        out_features: N, any size of 1 or more.
        bias: whether there is a bias.
        bits: 2 to 5.
        codebook: name or table of ``2**bits`` numbers (``codebooks.resolve``). With ``"layer"`` the levels become the
            layer's own with the first weight that it quantizes; later ones take them as they are.
        exponent: power of two that multiplies the levels.
        device: of the parameters and the codebook.
        dtype: of the bias.
        scale: how ``load_dense`` finds the scale of a block: ``"search"``, by the squared error, or ``"absmax"``, from
            its largest magnitude (``hf_kbit.quantize``).

    A new layer holds zeros in ``weight`` and ``weight_absmax`` and so computes its bias; load a state dict, or use
    ``from_linear``.

    Raises:
        ValueError: bits, codebook or a size is out of range.

    >>> layer = KbitLinear.from_linear(nn.Linear(100, 64), bits=3)
    >>> layer
    KbitLinear(in_features=100, out_features=64, bias=True, bits=3)
    >>> layer(torch.randn(2, 7, 100)).shape
    torch.Size([2, 7, 64])
    """

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
    ):
        nn.Module.__init__(self)  # nn.Linear's would allocate the dense weight
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"{name}: found {size}, expected 1 or more")
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.scale = check_bits(bits), check_scale(scale)
        self.refine_levels = isinstance(codebook, str) and codebook == "layer"
        planes = torch.zeros(weight_shape(out_features, in_features, bits), dtype=torch.int32, device=device)
        absmax = torch.zeros(absmax_shape(out_features, in_features), dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(planes, requires_grad=False)
        self.weight_absmax = nn.Parameter(absmax, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_buffer("codebook", None, persistent=False)
        self.set_codebook(codebook, exponent, planes.device)

    def set_codebook(self, codebook: str | Iterable[float], exponent: int, device: torch.device) -> None:
        """Sets ``levels``, ``exponent`` and, on ``device``, the ``codebook`` buffer made of them."""
        self.levels, self.exponent = codebooks.resolve(codebook, self.bits), exponent
        self.codebook = codebooks.scaled(self.levels, exponent, device)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        bits: int = 4,
        codebook: str | Iterable[float] = DEFAULT_CODEBOOK,
        scale: str = DEFAULT_SCALE,
    ) -> "KbitLinear":
        """Quantizes an ``nn.Linear`` where it is; ``linear`` stays as it was, and its bias is shared.

        Args:
            linear: weight float32, float16 or bfloat16 ``[N, K]``.
            bits: 2 to 5.
            codebook: name or table of ``2**bits`` numbers.
            scale: ``"search"`` or ``"absmax"``.

        Raises:
            TypeError: the weight has another dtype.
            ValueError: bits or codebook is out of range, or the weight holds NaN or infinity.

        >>> KbitLinear.from_linear(nn.Linear(64, 64, bias=False), bits=2).weight.shape
        torch.Size([64, 4])
        """
        layer = cls(linear.in_features, linear.out_features, False, bits, codebook, device="meta", scale=scale)
        layer.load_dense(linear.weight)
        layer.bias = linear.bias
        return layer.train(linear.training)

    def choose_levels(self, weight: torch.Tensor, name: str = "weight") -> None:
        """Sets what it takes to decode a weight once it is quantized.

        That is ``exponent``, which keeps the scales inside E4M4, and, with the codebook ``"layer"`` and the first
        weight, ``levels``; the ``codebook`` buffer is left to ``set_codebook``.

        Args:
            weight: float32, float16 or bfloat16 ``[N, K]``.
            name: what errors call the weight.

        Raises:
            ValueError: the weight holds NaN or infinity.
        """
        # NaN and infinity survive the extremes, so one value read back serves the check and the exponent.
        lowest, highest = torch.aminmax(weight)
        largest = torch.maximum(-lowest, highest).item()
        if not largest < float("inf"):
            raise ValueError(f"{name}: found NaN or infinite values, expected finite ones")
        self.exponent = layer_exponent(largest)
        if self.refine_levels:
            self.levels = refine(weight, self.levels, self.exponent, self.scale == "search")
            self.refine_levels = False

    def quantize(self, weight: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
        """planes and absmax (see ``hf_kbit.quantize``) of a weight, on its own device, after ``choose_levels``."""
        weight = weight.detach()
        self.choose_levels(weight, name)
        codebook = codebooks.scaled(self.levels, self.exponent, weight.device)
        return torch.ops.hf_kbit.quantize(weight, codebook, self.scale == "search")

    def load_dense(self, weight: torch.Tensor, name: str = "weight") -> None:
        """Replaces the weight by the quantized ``weight`` ``[N, K]``, which also decides device and exponent."""
        self.load_planes(*self.quantize(weight, name))

    def load_planes(self, planes: torch.Tensor, absmax: torch.Tensor) -> None:
        """Replaces the weight by one in the stored form, which also decides the device, for the levels chosen."""
        self.weight = nn.Parameter(planes, requires_grad=False)
        self.weight_absmax = nn.Parameter(absmax, requires_grad=False)
        self.set_codebook(self.levels, self.exponent, planes.device)
        self.to_tiles()

    # --- the form of the weight ---

    @property
    def is_tiled(self) -> bool:
        """Whether ``weight`` and ``weight_absmax`` hold tiles rather than the stored planes."""
        return self.weight.dim() != 2

    def to_tiles(self) -> None:
        """Repacks the weight in place into what GPU kernels read; does nothing if it is not on a GPU, or sharded."""
        here = type(self.weight.data) is torch.Tensor and self.weight.is_cuda and _native.library("cuda").loaded
        if here and not self.is_tiled:
            self.weight.data, self.weight_absmax.data = self._repacked(inverse=False)

    def to_planes(self) -> None:
        """Turns tiles back into the stored planes, in place and where they are."""
        if self.is_tiled:
            self.weight.data, self.weight_absmax.data = self._repacked(inverse=True)

    def _repacked(self, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        shape = [self.out_features, self.in_features]
        return torch.ops.hf_kbit.repack(self.weight.data, self.weight_absmax.data, self.bits, shape, inverse)

    # --- use ---

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded weight ``[N, K]``; in the dtype of the bias, or float32 without one, unless ``dtype`` says."""
        if dtype is None:
            dtype = torch.float32 if self.bias is None else self.bias.dtype
        shape = [self.out_features, self.in_features]
        return torch.ops.hf_kbit.dequantize(self.weight, self.weight_absmax, self.codebook, shape, dtype)

    @property
    def W_q(self) -> torch.Tensor:
        """The packed weight. Where a layer has this name, PEFT takes ``dequantize()`` for its weight (DoRA)."""
        return self.weight

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A plain ``nn.Linear`` with the decoded weight and the same bias, on the same device."""
        weight = self.dequantize(dtype)
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(weight)
        linear.bias = None if self.bias is None else nn.Parameter(self.bias.to(weight.dtype))
        return linear.train(self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` floating ``[*, K]`` to ``[*, N]`` of the same dtype, or of autocast's where it is on."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if not x.is_floating_point():
            raise TypeError(
                f"x: found dtype {x.dtype}, expected a floating one. Some models cast to `weight.dtype`, an integer "
                "type here: name such a layer in `modules_to_not_convert`"
            )
        # Straight from the dictionaries, and no conversion to the same dtype: for few tokens the host's time counts,
        # and nn.Module's look-ups are a good part of it.
        weight, absmax = self._parameters["weight"], self._parameters["weight_absmax"]
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        # A shard of tensor parallelism has fewer rows than out_features; it is never tiled.
        rows = weight.shape[0] if weight.dim() == 2 else self.out_features
        return gemm_op(x, bias)(x, weight, absmax, self._buffers["codebook"], bias, rows)

    def reset_parameters(self) -> None:
        """Does nothing: a quantized weight has no random initialisation."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits}"

    # --- nn.Module's ways in and out: always in the stored form ---

    def _apply(self, fn, recurse=True):
        self.to_planes()
        super()._apply(fn, recurse)
        self.set_codebook(self.levels, self.exponent, self.codebook.device)
        self.to_tiles()
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if _LEFT_OUT.get():
            del destination[prefix + "weight"], destination[prefix + "weight_absmax"]
        elif self.is_tiled:
            planes = self._repacked(inverse=True)
            for name, tensor in zip(("weight", "weight_absmax"), planes, strict=True):
                destination[prefix + name] = tensor.cpu()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        # nn.Module would copy any dtype into ours: floats cut to integers, without a word.
        for name in ("weight", "weight_absmax"):
            found, expected = state_dict.get(prefix + name), getattr(self, name)
            if found is not None and found.dtype != expected.dtype:
                errors.append(f"{prefix + name}: found dtype {found.dtype}, expected {expected.dtype}")
                return
        self.to_planes()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        self.to_tiles()

    def __getstate__(self):
        if not self.is_tiled:
            return self.__dict__
        names = ("weight", "weight_absmax")
        planes = (nn.Parameter(tensor, requires_grad=False) for tensor in self._repacked(inverse=True))
        return {**self.__dict__, "_parameters": {**self._parameters, **dict(zip(names, planes, strict=True))}}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.to_tiles()

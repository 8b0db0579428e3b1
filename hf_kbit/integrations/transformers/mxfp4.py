"""Experts that a checkpoint holds in MXFP4, as GPT-OSS is published: taken over as they are, onto the levels ``fp4``.

A projection of E experts is two tensors there, uint8. ``NAME_blocks`` ``[E, N, B, 16]`` has the E2M1 codes of the 32
weights of a block, two in a byte, the first in its lower half; ``NAME_scales`` ``[E, N, B]`` has the power of two of
each block, E8M0: ``2**(byte - 127)``. Blocks are of 32 neighbours along K, as ours. So in 4 bits the codes stay what
they are, and a scale becomes 6 times itself, for our levels end at 1: ``1.5 * 2**n``, which E4M4 holds for 18 numbers
n in a row, the last three of them below its normal numbers. The exponent of the projection says which 18. A block of a
smaller scale, less than 2**-17 of the largest, is quantized anew, alone. There is no transform.

Source: OCP Microscaling Formats (MX) Specification 1.0; the names and the order of Transformers' ``Mxfp4Config``.
"""

import math
from collections.abc import Iterable
from functools import cache, wraps
from typing import NamedTuple

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.base import HfQuantizer

from hf_kbit.format import codebooks
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.format.reference import pack_codes, power_of_two
from hf_kbit.format.spec import BLOCK_SIZE, encode_e4m4
from hf_kbit.integrations.transformers import streams
from hf_kbit.nn.site import site_of
from hf_kbit.plan.config import KbitConfig
from hf_kbit.weight.packing import of_planes
from hf_kbit.weight.tensor import Packed

BITS = 4
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
# E4M4 holds 1.5 * 2**n exactly for these, and every smaller n.
LEAST, MOST = -13, 4
LARGEST_SCALE = 251  # 6 * 2**(251 - 127) is a number of float32
NAN = 255


class Mxfp4(NamedTuple):
    """A projection as it is in a checkpoint: uint8 ``[E, N, B, 16]`` and ``[E, N, B]``."""

    blocks: torch.Tensor
    scales: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.blocks.device


def projections(names: Iterable[str]) -> list[str]:
    """Names in the checkpoint of the tensors that it holds in MXFP4."""
    names = set(names)
    scaled = (name.removesuffix(SCALES_SUFFIX) for name in names if name.endswith(SCALES_SUFFIX))
    return sorted(name for name in scaled if name + BLOCKS_SUFFIX in names)


# --- values ---------------------------------------------------------------------------------------


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """uint8 ``[256, 2]``: the codes of a byte's two weights, as indices of ``codebooks.fp4()``.

    Those levels ascend; E2M1 has a sign and ascending magnitudes. Of the two zeros, 7 is the positive one.
    """
    index = [7, *range(9, 16), 8, *range(6, -1, -1)]
    pairs = [[index[byte & 15], index[byte >> 4]] for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.uint8, device=device)


def pack(stored: Mxfp4, name: str) -> tuple[Packed, int]:
    """The packed weight ``[E, N, 32 * B]`` in 4 bits, and how many of its blocks had to be quantized anew.

    Raises:
        ValueError: a scale is NaN, or too large for float32 to hold 6 times it.

    >>> blocks, scales = torch.full((1, 2, 1, 16), 0x72, dtype=torch.uint8), torch.full((1, 2, 1), 127).byte()
    >>> packed, anew = pack(Mxfp4(blocks, scales), "down_proj")  # 1, 6, 1, 6 and so on
    >>> from hf_kbit.ops import dequantize
    >>> codebook = packed.decoding.codebook("cpu")
    >>> dequantize(*packed.tensors.values(), codebook, (2, 32), torch.float32)[0, 0, :2], anew
    (tensor([1., 6.]), 0)
    """
    least, most = _range(stored, name)
    # A scale becomes 1.5 * 2**n for n = byte - 125 - exponent. With the exponent next to 0 that leaves no block above
    # what E4M4 holds and, if there is one, none below.
    exponent = max(most - 125 - MOST, min(0, least - 125 - LEAST))
    decoding = ScalarDecoding(codebooks.fp4(), exponent, "none")
    codebook, device = decoding.codebook(stored.device), stored.device
    absmax_of = torch.tensor(
        [encode_e4m4(math.ldexp(1.5, byte - 125 - exponent)) for byte in range(256)], dtype=torch.uint8, device=device
    )
    experts, out_features, blocks = stored.scales.shape
    planes = torch.empty((experts, out_features, blocks * BITS), dtype=torch.int32, device=device)
    absmax, anew = torch.empty_like(stored.scales), 0
    for i, (codes, scales) in enumerate(zip(*stored, strict=True)):  # codes take a byte each before they are packed
        planes[i] = pack_codes(_pairs(device)[codes.int()].flatten(-2), BITS)
        absmax[i] = absmax_of[scales.int()]
        small = _used(codes) & (scales < 125 + exponent + LEAST)
        if small.any():
            weights = _decoded(codes[small], scales[small])
            words, own = torch.ops.hf_kbit.quantize(weights, codebook, True)
            planes[i].view(out_features, blocks, BITS)[small], absmax[i][small] = words, own[:, 0]
            anew += len(weights)
    return of_planes(planes, absmax, decoding), anew


def _used(blocks: torch.Tensor) -> torch.Tensor:
    """bool ``[N, B]``: whether a block ``[N, B, 16]`` is not all zero; else its scale means nothing."""
    return (blocks & 0x77).amax(-1) > 0


def _range(stored: Mxfp4, name: str) -> tuple[int, int]:
    """The least and the largest scale of a block that is not zero; errors are those of ``pack``."""
    used = torch.cat([scales[_used(blocks)] for blocks, scales in zip(*stored, strict=True)])
    least, most = torch.stack(torch.aminmax(used)).tolist() if len(used) else (125, 125)
    is_nan = bool((stored.scales == NAN).any())
    if is_nan or most > LARGEST_SCALE:
        found = "255, which is NaN" if is_nan else most
        raise ValueError(f"{name}{SCALES_SUFFIX}: found {found}, expected at most {LARGEST_SCALE}, which is 2**124")
    return least, most


def _decoded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 ``[*, 32]`` of blocks ``[*, 16]`` and scales ``[*]``."""
    levels = codebooks.scaled(codebooks.fp4(), 0, blocks.device) * 6
    halves = levels[_pairs(blocks.device)[blocks.int()].flatten(-2).int()] / 2
    return halves * power_of_two(scales.int() - 126)[..., None]


def dense(stored: Mxfp4, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The weight ``[E, N, 32 * B]``."""
    _range(stored, name)
    experts, out_features, blocks = stored.scales.shape
    weight = torch.empty((experts, out_features, blocks * BLOCK_SIZE), dtype=dtype, device=stored.device)
    for own, codes, scales in zip(weight, *stored, strict=True):  # with memory for one in float32
        own.copy_(_decoded(codes, scales).flatten(-2))
    return weight


def check_shapes(stored: Mxfp4, shape: tuple[int, ...], name: str) -> None:
    """Refuses tensors of another shape than a weight ``[E, N, K]`` needs."""
    blocks = [*shape[:-1], shape[-1] // BLOCK_SIZE]
    shapes = [*blocks, BLOCK_SIZE // 2], blocks
    for suffix, tensor, expected in zip((BLOCKS_SUFFIX, SCALES_SUFFIX), stored, shapes, strict=True):
        if list(tensor.shape) != expected:
            raise ValueError(f"{name + suffix}: found shape {list(tensor.shape)}, expected {expected}")


# --- loading --------------------------------------------------------------------------------------


class CollectMxfp4(ConversionOps):
    """Two tensors of a checkpoint in, one projection out: packed if it is to be so in 4 bits, else decoded."""

    def __init__(self, hf_quantizer: HfQuantizer):
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo):
        return self  # it is copied for each weight

    @torch.no_grad()
    def convert(self, input_dict, *args, model=None, full_layer_name=None, **kwargs):
        streams.hold(input_dict)
        # Transformers has cast them to the model's dtype, which holds all of 0 to 255.
        tensors = {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in input_dict.items()}
        away = self.hf_quantizer.away
        how = {"dtype": torch.uint8, "device": None if away is None else away.device}
        (blocks,) = (tensor.to(**how) for name, tensor in tensors.items() if name.endswith(BLOCKS_SUFFIX))
        (scales,) = (tensor.to(**how) for name, tensor in tensors.items() if name.endswith(SCALES_SUFFIX))
        stored, site, name = Mxfp4(blocks, scales), site_of(model, full_layer_name), full_layer_name
        bits, anew = site.layer.bits if site.is_packed else None, None
        try:
            check_shapes(stored, site.shape, name)
            if bits == BITS:
                value, anew = pack(stored, name)
            else:
                value = site.turned(dense(stored, name, site.weight.dtype)).contiguous()
        except ValueError as error:
            # Transformers would swallow it here; it is raised when all weights have been seen.
            self.hf_quantizer.problems.append(str(error))
            value = site.turned(torch.zeros(site.shape, dtype=site.weight.dtype, device=blocks.device)).contiguous()
        if bits is not None:
            self.hf_quantizer.from_mxfp4[name] = anew
        return {name: value}


def conversions(names: Iterable[str], hf_quantizer: HfQuantizer) -> list[WeightConverter]:
    """What loads the projections of ``projections``."""
    own_names, collect = sorted({name.rpartition(".")[2] for name in names}), CollectMxfp4(hf_quantizer)
    return [WeightConverter([own + BLOCKS_SUFFIX, own + SCALES_SUFFIX], own, [collect]) for own in own_names]


def is_config(quantization_config) -> bool:
    """Whether it says, as an object or as a dict, that a checkpoint has experts in MXFP4."""
    found = quantization_config if isinstance(quantization_config, dict) else quantization_config.to_dict()
    return found.get("quant_method") == "mxfp4"


def wrap_merge(merge_quantization_configs):
    """``merge_quantization_configs`` that takes the user's ``KbitConfig`` for a checkpoint in MXFP4."""

    @wraps(merge_quantization_configs)
    def wrapped(cls, quantization_config, quantization_config_from_args, *args, **kwargs):
        if isinstance(quantization_config_from_args, KbitConfig) and is_config(quantization_config):
            return quantization_config_from_args
        return merge_quantization_configs(cls, quantization_config, quantization_config_from_args, *args, **kwargs)

    return wrapped

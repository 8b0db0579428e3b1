"""What of a weight the scales of its layer cannot hold.

A layer has one exponent, and a scale one byte, so that the smallest scale is a fixed part of the largest. In a row
whose largest scale is one or two times the smallest there is, all others are rounded to these or to zero, and the row
is stored coarsely, or lost. A block of 32 columns is lost likewise, where the scales of all rows are so small in it.
"""

import torch

from hf_kbit.format.reference import MAGNITUDE, decode_scales, row_slices
from hf_kbit.format.spec import BLOCK_SIZE, num_blocks

# Of the scale that is the largest of a row, in parts of the smallest. From here on a Gaussian row's squared error is
# at most twice what its width explains; where it is 2, up to 20 times, at 1 up to 460 (rows of 256 to 4096).
HELD = 3
# Of the scales of such a row: if more of them are zero, much of the row is.
MUCH = 0.25
# Of the median row: what is smaller is dead, as rows are that training has never reached or has pruned.
DEAD = 2.0**-20
LARGEST_FLOAT16 = 65504.0
# Up to here a weight decodes to numbers of float16, however it is rounded and turned.
FAR_FROM_LARGEST = 2.0**12

_SLICE = 1 << 20  # weights at a time


def lost_rows(weight: torch.Tensor, absmax: torch.Tensor, signed: bool, coarse: bool = False) -> str:
    """The rows, and the blocks of columns, of which much decodes to zero, such as ``"64 of 256 rows"``; "" where there
    are none. Rows and blocks of zeros are held, and those that are dead beside the others do not count.

    The scales of a layer say which rows may be lost, in a thousandth of the time that quantizing takes; weights are
    read where there are such rows alone.

    Args:
        weight: floating ``[*, N, K]``, or made a matrix at a time (``reference.matrices``).
        absmax: uint8 scales ``[*, N, B]`` of that weight, or of what is stored for it.
        signed: whether they are SE3M4 rather than E4M4.
        coarse: whether rows count, too, whose scales are coarse, but not zero.

    >>> weight = torch.cat([torch.ones(3, 32), torch.full((1, 32), 1e-3), torch.zeros(1, 32)])
    >>> lost_rows(weight, torch.tensor([[176], [176], [176], [2], [0]], dtype=torch.uint8), False, coarse=True)
    '1 of 5 rows'
    """
    steps = absmax.flatten(0, -2)
    steps = steps & MAGNITUDE if signed else steps
    rows, blocks = steps.amax(1) < HELD, steps.amax(0) < HELD
    if not coarse and (rows.any() | blocks.any()):
        zero = (steps == 0).float()
        rows, blocks = rows & (zero.mean(1) > MUCH), blocks & (zero.mean(0) > MUCH)
    if not (rows.any() | blocks.any()):
        return ""
    found = []
    for what, chosen, largest in (("rows", rows, _of_rows), (f"blocks of {BLOCK_SIZE} columns", blocks, _of_blocks)):
        if chosen.any() and (count := int((chosen & _counts(largest(weight))).sum())):
            found.append(f"{count:,} of {len(chosen):,} {what}")
    return " and ".join(found)


def is_wide(weight: torch.Tensor) -> bool:
    """Whether a weight ``[*, N, K]`` has a row or a block of columns that scales may not hold whatever the exponent
    is: without a transform they hold what is up to ``2**14`` times smaller than the largest weight.

    >>> is_wide(torch.tensor([[1.0, 1.0], [1e-5, 1e-5]])), is_wide(torch.tensor([[1.0, 1.0], [1e-3, 0.0]]))
    (True, False)
    """
    for largest in (_of_rows(weight), _of_blocks(weight)):
        counted = largest[_counts(largest)]
        if len(counted) and counted.min() < 2.0**-14 * largest.max():
            return True
    return False


def _counts(largest: torch.Tensor) -> torch.Tensor:
    """Whether a row, of whose weights this is the largest magnitude, is neither zero nor dead beside the others."""
    used = largest > 0
    return used & (largest >= DEAD * largest[used].median()) if used.any() else used


def _of_rows(weight: torch.Tensor) -> torch.Tensor:
    """The largest magnitudes, float32, of the rows."""
    return torch.cat([part.abs().amax(1).float() for part in row_slices(weight, _SLICE)])


def _of_blocks(weight: torch.Tensor) -> torch.Tensor:
    """The largest magnitudes, float32, of the blocks of columns."""
    in_features = weight.shape[-1]
    largest = torch.zeros(num_blocks(in_features) * BLOCK_SIZE, device=weight.device)
    for part in row_slices(weight, _SLICE):
        own = largest[:in_features]
        torch.maximum(own, part.abs().amax(0).float(), out=own)
    return largest.view(-1, BLOCK_SIZE).amax(1)


def in_float16(packed, in_features: int) -> bool:
    """Whether float16 holds all that a scalar weight, a ``tensor.Packed``, decodes to, and what is stored for it."""
    (planes, absmax, *columns), decoding = packed.tensors.values(), packed.decoding
    codebook, step = decoding.codebook(planes.device), max(_SLICE // in_features, 1)
    stored = decode_scales(absmax.unique(), decoding.transformed).abs().max() * codebook.abs().max()
    if stored > LARGEST_FLOAT16:
        return False
    for part in zip(planes.flatten(0, -2).split(step), absmax.flatten(0, -2).split(step), strict=True):
        how = codebook, [len(part[0]), in_features], torch.float32, *(columns or [None]), decoding.transformed
        if torch.ops.hf_kbit.dequantize(*part, *how).abs().max() > LARGEST_FLOAT16:
            return False
    return True

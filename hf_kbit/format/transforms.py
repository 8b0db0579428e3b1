"""What a layer may do to its input before the product: column scales, then a rotation within blocks.

A weight is easier to quantize where no input, and no weight of a block, stands out. So a layer may store, instead of
W, a weight whose columns are divided by **column scales** c, and whose blocks are turned by a fixed **rotation** R:

    stored = (W / c) @ R        W = (stored @ R) * c        x @ W.T = ((x * c) @ R) @ stored.T

R is the Hadamard matrix of 32 over its root, in each block of 32 in_features: symmetric, so its own inverse. It
spreads whatever stands out over the block. A row of K in_features is padded to whole blocks with zeros first; turned,
the padding holds numbers too. Here c is ``columns``, float32 ``[K]``; ops and files have it as E4M4 bytes.

Source: rotations as in QuaRot (arXiv:2404.00456) and QuIP# (arXiv:2402.04396), there of whole rows; column scales as
in AWQ (arXiv:2306.00978) and SINQ (arXiv:2509.22944), the latter of which finds them without data.
"""

import torch
import torch.nn.functional as F

from hf_kbit.format.spec import BLOCK_SIZE

# Blocks that are turned at a time: on a CPU as many as its cache holds.
_SLICE_ON_CPU, _SLICE = 1 << 13, 1 << 19


def rotate(x: torch.Tensor) -> torch.Tensor:
    """``x @ R`` in each block of 32 of the last dimension, which is padded with zeros to whole blocks.

    The same on every device, bit for bit: five rounds of sums and differences, of neighbours first, then the product
    with ``32**-0.5``, each rounded to the dtype of the result.

    Args:
        x: floating ``[*, K]``.

    Returns:
        ``[*, 32 * B]`` for ``B = ceil(K / 32)``, contiguous; float64 where x is, else float32.

    >>> x = torch.randn(3, 64)
    >>> bool(torch.allclose(rotate(rotate(x)), x, atol=1e-5))
    True
    """
    x = x if x.dtype == torch.float64 else x.float()
    if x.shape[-1] % BLOCK_SIZE:  # padding copies in any case
        x = F.pad(x, (0, -x.shape[-1] % BLOCK_SIZE))
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = _SLICE_ON_CPU if x.device.type == "cpu" else _SLICE
    parts = (tensor.reshape(-1, BLOCK_SIZE).split(size) for tensor in (x, turned))
    for part, out in zip(*parts, strict=True):
        torch.mul(butterflies(part.T.contiguous()).T, BLOCK_SIZE**-0.5, out=out)
    return turned


def butterflies(rows: torch.Tensor) -> torch.Tensor:
    """``H @ rows`` for Sylvester's Hadamard matrix H and ``[size, n]``, size a power of two; neighbours come first.
    ``rows``, which may be overwritten, are long, for speed."""
    others, size = torch.empty_like(rows), len(rows)
    for distance in (1 << step for step in range(size.bit_length() - 1)):
        pairs = size // (2 * distance), 2, distance, rows.shape[1]
        (first, second), (sums, differences) = rows.view(pairs).unbind(1), others.view(pairs).unbind(1)
        torch.add(first, second, out=sums)
        torch.sub(first, second, out=differences)
        rows, others = others, rows
    return rows


def to_stored(weight: torch.Tensor, columns: torch.Tensor | None, rotated: bool) -> torch.Tensor:
    """``(W / c) @ R``: what is quantized for a weight ``[*, N, K]``; float32, ``[*, N, 32 * B]`` if it is rotated.

    >>> to_stored(torch.randn(4, 100), None, rotated=True).shape
    torch.Size([4, 128])
    """
    stored = weight.float()
    if columns is not None:
        stored = stored / columns
    return rotate(stored) if rotated else stored


def to_original(stored: torch.Tensor, columns: torch.Tensor | None, rotated: bool, in_features: int) -> torch.Tensor:
    """``(stored @ R) * c``: the weight ``[*, N, K]`` that a decoded one stands for, float32 or float64 as it is."""
    weight = (rotate(stored) if rotated else stored)[..., :in_features]
    return weight if columns is None else weight * columns


def of_moments(second: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """The second moments of ``of_input(x, columns, rotated=True)``, given those of x; unchanged without columns.

    Args:
        second: float32 ``[K, K]``, a sum of ``x @ x.T``; or, without columns, its diagonal ``[K]``.
        columns: float32 ``[K]``.

    Returns:
        ``[32 * B, 32 * B]``, or ``second``.

    >>> x = torch.randn(10, 40)
    >>> turned = of_input(x, torch.ones(40), rotated=True)
    >>> torch.allclose(of_moments(x.T @ x, torch.ones(40)), turned.T @ turned, atol=1e-4)
    True
    """
    return second if columns is None else rotate(rotate(second * columns * columns[:, None]).T)


def of_input(x: torch.Tensor, columns: torch.Tensor | None, rotated: bool) -> torch.Tensor:
    """``(x * c) @ R``: what is multiplied by the stored weight, float64 where x ``[*, K]`` is, else float32."""
    scaled = x if x.dtype == torch.float64 else x.float()
    if columns is not None:
        scaled = scaled * columns
    return rotate(scaled) if rotated else scaled

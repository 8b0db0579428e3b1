"""The stored form of scalar weights: what ``save_pretrained`` writes and every implementation reads.

A weight ``W[N, K]`` (N out_features, K in_features) is cut along K into blocks of 32, the last one padded with zeros.
Each block keeps one scale, its *absmax*, and 32 *codes*: indices into a *codebook* of ``2**bits`` levels.

``weight``, int32 ``[N, B * bits]`` with ``B = ceil(K / 32)``, holds the codes as *bit-planes*: bit ``j`` of word
``[n, b * bits + p]`` is bit ``p`` of the code of ``W[n, 32 * b + j]``. ``weight_absmax``, uint8 ``[N, B]``, holds the
scales as E4M4 bytes. The decoded weight is ``2**exponent * levels[code] * absmax``; ``levels`` (float32, ascending,
largest magnitude 1) and ``exponent`` (0 unless a layer needs another) come from ``quantization_config`` in
``config.json``.

In version 2 that may be the weight of a transformed layer: W with its columns divided by *column scales*, then turned
in each block by the Hadamard matrix of 32 over its root. ``weight_columns``, uint8 ``[K]``, holds the column scales as
E4M4 bytes. The scales of its blocks have signs: ``weight_absmax`` holds SE3M4 bytes, a sign in the eighth bit and 16
times what the lower seven are as E4M4.

``docs/format.md`` has a reader in plain Python, against which ``reference`` is tested.
"""

import math

FORMAT_VERSIONS = PLAIN, TRANSFORMED, TRELLIS = 1, 2, 3  # the least that reads what a model has
BITS = (2, 3, 4, 5)
BLOCK_SIZE = 32

E4M4_BIAS, E4M4_MAX = 11, 31.0
SE3M4_BIAS = 7
MAX_EXPONENT = 126  # 2**exponent is a normal float32


def num_blocks(in_features: int) -> int:
    """Blocks in one row of ``in_features`` weights, the padded last one included.

    >>> num_blocks(32), num_blocks(33)
    (1, 2)
    """
    return -(-in_features // BLOCK_SIZE)


def weight_shape(out_features: int, in_features: int, bits: int) -> tuple[int, int]:
    """Shape of the int32 tensor of bit-planes."""
    return out_features, num_blocks(in_features) * bits


def absmax_shape(out_features: int, in_features: int) -> tuple[int, int]:
    """Shape of the uint8 tensor of scales."""
    return out_features, num_blocks(in_features)


def check_bits(bits: object, name: str = "bits", among: tuple[int, ...] = BITS) -> int:
    """Returns ``bits`` if it is a width of the format; a ValueError begins with ``name``."""
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in among:
        raise ValueError(f"{name}: found {bits!r}, expected one of {', '.join(map(str, among))}")
    return bits


def check_exponent(exponent: object, signed: bool, name: str = "exponent") -> int:
    """Returns ``exponent`` if a layer may have it: its levels stay numbers of float32, also where ops take them 16
    times as large, for scales that have signs."""
    most = MAX_EXPONENT - (E4M4_BIAS - SE3M4_BIAS if signed else 0)
    if not isinstance(exponent, int) or isinstance(exponent, bool) or abs(exponent) > most:
        raise ValueError(f"{name}: found {exponent!r}, expected an integer within +-{most}")
    return exponent


def decode_e4m4(byte: int) -> float:
    """Value of an E4M4 byte: exponent ``e = byte >> 4``, mantissa ``m = byte & 15``, no sign.

    ``2**(e - 11) * (1 + m / 16)`` for ``e > 0`` and ``2**-10 * m / 16`` for ``e = 0``. float16, bfloat16 and float32
    hold every value exactly.

    >>> decode_e4m4(0), decode_e4m4(0xB0), decode_e4m4(0xFF)
    (0.0, 1.0, 31.0)
    """
    exponent, mantissa = byte >> 4, byte & 15
    if exponent == 0:
        return math.ldexp(mantissa, 1 - E4M4_BIAS - 4)
    return math.ldexp(16 + mantissa, exponent - E4M4_BIAS - 4)


def encode_e4m4(value: float) -> int:
    """The E4M4 byte nearest to ``value >= 0``: ties to the even mantissa, saturating at 31.

    >>> encode_e4m4(1.0) == 0xB0, encode_e4m4(1.99) == 0xC0, encode_e4m4(1e9) == 0xFF
    (True, True, True)
    """
    if value == 0.0:
        return 0
    exponent = max(math.frexp(value)[1] - 1, 1 - E4M4_BIAS)
    sixteenths = round(math.ldexp(value, 4 - exponent))  # to 32, which carries; under 16 only in the subnormal range
    return min((exponent + E4M4_BIAS - 1) * 16 + sixteenths, 255)


def layer_exponent(largest: float, signed: bool = False, widest: bool = False) -> int:
    """The ``exponent`` of a layer whose largest weight magnitude is ``largest``: 0 unless scales would lack range.

    E4M4 scales are normal numbers from 2**-10 to 31. A layer between 2**-6 and 31 has four octaves or more below its
    largest scale and stays as it is; any other is shifted by the power of two that puts ``largest`` in [8, 16).
    Those with signs are from 2**-6 to 31/16, and a block's may be half as large again as its largest weight: a layer
    between 2**-4 and 5/4 stays as it is; any other is shifted by the power of two that puts ``largest`` between half
    of that and that.

    ``widest``: scales are to be as small as they can beside the largest, and every layer is shifted, without signs to
    [16, 32), where 31 serves what is above it too. Weights that float16 holds decode to such: 31 * 2**11 is 63488.

    >>> layer_exponent(0.5), layer_exponent(1000.0), layer_exponent(0.001)
    (0, 6, -13)
    >>> layer_exponent(0.5, signed=True), layer_exponent(1000.0, signed=True), layer_exponent(0.001, signed=True)
    (0, 10, -10)
    >>> layer_exponent(0.5, widest=True), layer_exponent(65504.0, widest=True)
    (-5, 11)
    """
    least, most = (2.0**-4, 1.25) if signed else (2.0**-6, E4M4_MAX)
    if largest == 0.0 or (least <= largest <= most and not widest):
        return 0
    exponent = math.frexp(largest / most)[1] if signed else math.frexp(largest)[1] - 4 - widest
    return max(exponent, -100)  # float32 keeps its normal range for levels * 2**exponent * absmax

"""The scalar definitions of the stored format, and the golden file that pins its bytes."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_kbit import codebooks, format, reference
from hf_kbit.balance import balance
from hf_kbit.format import BITS, decode_e4m4, decode_se3m4, encode_e4m4
from hf_kbit.nn.weight import PACKED
from hf_kbit.packed import Decoding, quantize_weight

GOLDEN = Path(__file__).parent / "data"


def test_e4m4_values():
    values = [decode_e4m4(byte) for byte in range(256)]
    assert values == sorted(set(values)), "E4M4 must be strictly ascending"
    assert values[0] == 0.0 and values[1] == 2.0**-14 and values[16] == 2.0**-10 and values[255] == 31.0
    for byte in range(16, 256):
        assert values[byte] == 2.0 ** ((byte >> 4) - 11) * (1 + (byte & 15) / 16)
    half = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(half.half().double(), half) and torch.equal(half.bfloat16().double(), half)


def test_e4m4_round_trip():
    assert [encode_e4m4(decode_e4m4(byte)) for byte in range(256)] == list(range(256))


def test_e4m4_rounds_to_nearest_and_ties_to_even():
    for byte in range(255):
        low, high = decode_e4m4(byte), decode_e4m4(byte + 1)
        middle = (low + high) / 2
        assert encode_e4m4(middle) == byte + (byte & 1), "a tie goes to the even mantissa, carrying into the exponent"
        assert encode_e4m4(math.nextafter(middle, 0.0)) == byte
        assert encode_e4m4(math.nextafter(middle, 32.0)) == byte + 1


def test_e4m4_saturates():
    assert encode_e4m4(31.5) == encode_e4m4(32.0) == encode_e4m4(3e38) == 255
    assert encode_e4m4(2.0**-16) == encode_e4m4(5e-324) == 0


def test_se3m4_values():
    values = [decode_se3m4(byte) for byte in range(256)]
    assert values[0] == 0.0 and values[1] == 2.0**-10 and values[16] == 2.0**-6 and values[127] == 1.9375
    assert values[:128] == sorted(set(values[:128])), "ascending by the lower seven bits"
    assert values[128:] == [-value for value in values[:128]], "the eighth is the sign"
    for byte in range(16, 128):
        assert values[byte] == 2.0 ** ((byte >> 4) - 7) * (1 + (byte & 15) / 16)


@pytest.mark.parametrize("bits", BITS)
def test_pack_block(bits):
    codes = [random.Random(bits).randrange(2**bits) for _ in range(32)]
    words = format.pack_block(codes, bits)
    assert len(words) == bits and all(0 <= word < 2**32 for word in words)
    assert format.unpack_block(words) == codes
    for j, code in enumerate(codes):
        for plane in range(bits):
            assert (words[plane] >> j) & 1 == (code >> plane) & 1


def test_shapes():
    assert format.weight_shape(7, 1, 2) == (7, 2) and format.absmax_shape(7, 1) == (7, 1)
    assert format.weight_shape(7, 32, 5) == (7, 5) and format.absmax_shape(7, 32) == (7, 1)
    assert format.weight_shape(7, 33, 3) == (7, 6) and format.absmax_shape(7, 33) == (7, 2)


@pytest.mark.parametrize("bits", [1, 6, 0, -3, 3.0, "3", None, True])
def test_check_bits_refuses(bits):
    with pytest.raises(ValueError, match=r"bits: found .*, expected one of 2, 3, 4, 5"):
        format.check_bits(bits)


def test_layer_exponent_keeps_scales_normal():
    for largest in [1e-38, 1e-6, 0.0155, 0.0157, 0.5, 30.9, 31.0, 31.1, 1e4, 3e38]:
        scaled = largest * 2.0 ** -format.layer_exponent(largest)
        assert scaled <= 31.0
        assert scaled >= 2.0**-6 or largest < 1e-30
    assert format.layer_exponent(0.0) == 0


def test_layer_exponent_of_signed_scales():
    """Those of a layer it moves end within an octave of its largest weight; none of another size moves."""
    magnitudes = [10.0 ** (i / 8) for i in range(-240, 241)]
    for largest in [*magnitudes, 1.25, math.nextafter(1.25, 2), 0.0625, math.nextafter(0.0625, 0), 2.0**100]:
        exponent = format.layer_exponent(largest, signed=True)
        scaled = largest * 2.0**-exponent
        assert scaled <= 1.25, largest
        assert scaled >= (0.0625 if exponent == 0 else 0.625), largest
    assert format.layer_exponent(0.0, signed=True) == format.layer_exponent(0.0625, signed=True) == 0
    assert format.layer_exponent(1e-45, signed=True) == -100


@pytest.mark.parametrize("bits", BITS)
def test_golden_file(bits):
    """What release 0.1 wrote must be read for ever: names, shapes, dtypes, bytes, and the values they stand for."""
    tensors = load_file(GOLDEN / "golden.safetensors")
    meta = json.loads((GOLDEN / "golden.json").read_text())[str(bits)]
    planes, absmax = tensors[f"layer{bits}.weight"], tensors[f"layer{bits}.weight_absmax"]
    out_features, in_features = meta["shape"]
    assert planes.dtype == torch.int32 and planes.shape == format.weight_shape(out_features, in_features, bits)
    assert absmax.dtype == torch.uint8 and absmax.shape == format.absmax_shape(out_features, in_features)

    # Decoded by the scalar definitions alone.
    decoded = []
    for row, scales in zip(planes.tolist(), absmax.tolist(), strict=True):
        values = []
        for block, byte in enumerate(scales):
            words = [word & 0xFFFFFFFF for word in row[block * bits : (block + 1) * bits]]
            scale = decode_e4m4(byte) * 2.0 ** meta["exponent"]
            values += [meta["levels"][code] * scale for code in format.unpack_block(words)]
        decoded.append(values[:in_features])
    expected = tensors[f"layer{bits}.decoded"]
    assert torch.equal(torch.tensor(decoded, dtype=torch.float64).float(), expected)

    # Read, and written again, by the library.
    levels = codebooks.canonical(meta["levels"], bits)
    assert levels == tuple(meta["levels"]) == codebooks.normal_float(bits)
    codebook = torch.tensor(levels) * 2.0 ** meta["exponent"]
    read = torch.ops.hf_kbit.dequantize(planes, absmax, codebook, [out_features, in_features], torch.float32)
    assert torch.equal(read, expected)
    written = torch.ops.hf_kbit.quantize(tensors[f"layer{bits}.original"], codebook)
    assert torch.equal(written[0], planes) and torch.equal(written[1], absmax)


@pytest.mark.parametrize("bits", BITS)
def test_golden_file_of_version_2(bits):
    """Transformed weights: column scales chosen, stored and decoded, to the same bits as by the scalar definitions."""
    tensors = load_file(GOLDEN / "golden2.safetensors")
    meta = json.loads((GOLDEN / "golden2.json").read_text())[str(bits)]
    shape, levels = meta["shape"], tuple(meta["levels"])
    stored, original = [tensors[f"layer{bits}.{name}"] for name in PACKED], tensors[f"layer{bits}.original"]
    assert [(x.dtype, tuple(x.shape)) for x in stored] == [
        (torch.int32, format.weight_shape(*shape, bits)),
        (torch.uint8, format.absmax_shape(*shape)),
        (torch.uint8, (shape[1],)),
    ]
    assert torch.equal(balance(original), stored[2])
    written = quantize_weight(original, levels, search=False, transform="rotated")
    assert written.decoding == Decoding(levels, meta["exponent"], "rotated")
    assert all(map(torch.equal, (written.planes, written.absmax, written.columns), stored))
    assert levels == codebooks.optimal(bits, signed=True)
    magnitudes = stored[1] & 127
    assert (stored[1] == 0).any() and (stored[1] > 128).any(), "a block of zeros, a negative scale"
    assert ((magnitudes > 0) & (magnitudes < 16)).any(), "a subnormal scale"
    codebook = written.decoding.codebook("cpu")
    for decode in (torch.ops.hf_kbit.dequantize, reference.dequantize):
        found = decode(*stored[:2], codebook, shape, torch.float32, stored[2], True)
        assert torch.equal(found, tensors[f"layer{bits}.decoded"])
    assert (found - original).square().mean() < 0.5 * original.square().mean()


def test_hadamard():
    """Symmetric, its own inverse, and the matrix that its docstring says."""
    unit = [[float(i == j) for j in range(32)] for i in range(32)]
    rows = [format.hadamard(row) for row in unit]
    for i, row in enumerate(rows):
        assert row == [(-1) ** (i & j).bit_count() * 32**-0.5 for j in range(32)]
        assert format.hadamard(row) == pytest.approx(unit[i], abs=1e-15)

"""The scalar definitions of the stored format, and the golden files that pin its bytes."""

import json
import math
import shutil
from pathlib import Path

import cases
import pytest
import torch
from safetensors.torch import load_file

from hf_kbit import codebooks
from hf_kbit.format import reference
from hf_kbit.format import spec as format
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.format.spec import BITS, decode_e4m4, encode_e4m4, layer_exponent
from hf_kbit.format.transforms import to_stored
from hf_kbit.weight.balance import balance
from hf_kbit.weight.packing import quantize_weight

GOLDEN = Path(__file__).parent / "data"


def test_e4m4():
    """Ascending, held by 16-bit numbers; encoded to the nearest, a tie to the even mantissa, from 0 to 31."""
    values = [decode_e4m4(byte) for byte in range(256)]
    assert values == [cases.format_page()["decode_e4m4"](byte) for byte in range(256)] == sorted(set(values))
    assert values[0] == 0.0 and values[1] == 2.0**-14 and values[16] == 2.0**-10 and values[255] == 31.0
    exact = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(exact.half().double(), exact) and torch.equal(exact.bfloat16().double(), exact)
    assert [encode_e4m4(value) for value in values] == list(range(256))
    for byte in range(255):
        middle = (values[byte] + values[byte + 1]) / 2
        assert encode_e4m4(middle) == byte + (byte & 1), "a mantissa that rounds up carries into the exponent"
        assert encode_e4m4(math.nextafter(middle, 0.0)) == byte
        assert encode_e4m4(math.nextafter(middle, 32.0)) == byte + 1
    assert encode_e4m4(31.5) == encode_e4m4(32.0) == encode_e4m4(3e38) == 255
    assert encode_e4m4(2.0**-16) == encode_e4m4(5e-324) == 0


@pytest.mark.parametrize("bits", [1, 6, 0, -3, 3.0, "3", None, True])
def test_check_bits_refuses(bits):
    with pytest.raises(ValueError, match=r"bits: found .*, expected one of 2, 3, 4, 5"):
        format.check_bits(bits)


@pytest.mark.parametrize(("signed", "least", "most"), [(False, 2.0**-6, 31.0), (True, 2.0**-4, 1.25)])
def test_layer_exponent(signed, least, most):
    """A layer stays as it is where its scales are normal numbers, or comes to within two octaves of the largest."""
    ends = [least, math.nextafter(least, 0), most, math.nextafter(most, 99), 1e-29, 1e-6, 2.0**100, 3e38]
    for largest in [*ends, *(10.0 ** (i / 8) for i in range(-230, 241))]:
        exponent = layer_exponent(largest, signed)
        scaled = largest * 2.0**-exponent
        assert (exponent == 0) == (least <= largest <= most), largest
        assert exponent == 0 or (0.625 if signed else 8) <= scaled <= (1.25 if signed else 16), largest
    assert layer_exponent(0.0, signed) == 0 and layer_exponent(1e-45, signed) == -100


def golden(version: int) -> tuple[dict, dict]:
    """Tensors of a golden file, and what is recorded of its layers, one of each width."""
    name = "golden" if version == 1 else f"golden{version}"
    recorded = json.loads((GOLDEN / f"{name}.json").read_text())
    return load_file(GOLDEN / f"{name}.safetensors"), {int(bits): entry for bits, entry in recorded.items()}


@pytest.mark.parametrize("version", [1, 2])
def test_golden_file_is_what_the_format_page_reads(version, tmp_path):
    tensors, recorded = golden(version)
    layers = {f"layer{bits}": {"bits": bits, "exponent": entry["exponent"]} for bits, entry in recorded.items()}
    levels = {bits: entry["levels"] for bits, entry in recorded.items()}
    config = {"quant_method": "kbit", "format_version": version, "bits": 4, "levels": levels, "layers": layers}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    shutil.copy(GOLDEN / ("golden.safetensors" if version == 1 else "golden2.safetensors"), tmp_path)
    read = cases.format_page()["read_kbit"](tmp_path)
    for bits in BITS:
        expected = tensors[f"layer{bits}.decoded"]
        found = torch.tensor(read[f"layer{bits}"][0], dtype=torch.float64).float()
        assert torch.equal(found[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", BITS)
def test_golden_file(bits, version):
    """What a release wrote is read and written for ever, to the same names, shapes, dtypes and bytes."""
    tensors, recorded = golden(version)
    shape, levels = recorded[bits]["shape"], tuple(recorded[bits]["levels"])
    stored = [tensors[f"layer{bits}.{name}"] for name in ScalarDecoding.names[: version + 1]]
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in stored] == [
        (torch.int32, format.weight_shape(*shape, bits)),
        (torch.uint8, format.absmax_shape(*shape)),
        (torch.uint8, (shape[1],)),
    ][: version + 1]
    signed = version == 2
    assert levels == (codebooks.optimal(bits, signed=True) if signed else codebooks.normal_float(bits))
    decoding = ScalarDecoding(levels, recorded[bits]["exponent"], "rotated" if signed else "none")
    codebook, original, columns = decoding.codebook("cpu"), tensors[f"layer{bits}.original"], None
    if signed:
        columns = stored[2]
        assert torch.equal(balance(original), columns)
        assert quantize_weight(original, levels, search=False, transform="rotated").decoding == decoding
        assert (stored[1] == 0).any() and (stored[1] > 128).any(), "a block of zeros, a negative scale"
        magnitudes = stored[1] & 127
        assert ((magnitudes > 0) & (magnitudes < 16)).any(), "a subnormal scale"
    scales = None if columns is None else reference.decode_e4m4(columns)
    written = torch.ops.hf_kbit.quantize(to_stored(original, scales, signed), codebook, False, signed)
    assert all(map(torch.equal, written, stored[:2]))
    for decode in (torch.ops.hf_kbit.dequantize, reference.dequantize):
        found = decode(*stored[:2], codebook, shape, torch.float32, columns, signed)
        assert torch.equal(found, tensors[f"layer{bits}.decoded"])

"""The vectorised specification against the scalar one."""

import math

import cases
import numpy as np
import pytest
import torch

from hf_kbit import codebooks
from hf_kbit.format import reference, transforms
from hf_kbit.format import spec as format


def test_e4m4_is_encoded_as_the_scalar_definition_says():
    edges = [0.0, 2.0**-15, 2.0**-14, 1.96875, 1.97, 31.0, 31.5, 1e9, 3e38, 1e-38, 1e-45]
    middles = [(format.decode_e4m4(b) + format.decode_e4m4(b + 1)) / 2 for b in range(255)]
    random = torch.exp2(torch.empty(5000).uniform_(-17, 6, generator=cases.generator(0))).tolist()
    values = torch.tensor(edges + middles + random)
    encoded = reference.encode_e4m4(values)
    assert encoded.tolist() == [format.encode_e4m4(value) for value in values.tolist()]


def test_scales_are_decoded_as_the_format_page_says():
    """Those with signs but for the 16 by which a Decoding multiplies the levels."""
    every, page = torch.arange(256).byte().view(16, 16), cases.format_page()
    for signed, factor, name in ((False, 1, "decode_e4m4"), (True, 16, "decode_se3m4")):
        found = factor * reference.decode_scales(every, signed)
        assert found.flatten().tolist() == [page[name](byte) for byte in range(256)]


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("levels", ["lopsided", "below", "symmetric"])
def test_quantize_with_signs_is_what_the_scalar_definition_says(levels, search):
    """Of one block after another; with a search, the codes and the sign."""
    table = {
        "lopsided": codebooks.optimal(3, signed=True),
        "below": codebooks.integer(3),
        "symmetric": codebooks.normal_float(3),
    }[levels]
    weight = cases.weight((40, 96), seed=1)
    weight[:, :32] *= torch.logspace(-6, 3, 40)[:, None]
    weight[5, 40], weight[5, 50] = weight[5, 32:64].abs().max() * torch.tensor([2.0, -2.0])
    codebook = 16 * torch.tensor(table)
    planes, absmax = reference.quantize(weight, codebook, search, signed=True)
    codes = reference.unpack_codes(planes, 3)
    middles = ((codebook[1:] + codebook[:-1]) / 2).tolist()
    for block, byte, found in zip(weight.view(-1, 32), absmax.flatten().tolist(), codes.view(-1, 32), strict=True):
        largest, least = block.max().item(), -block.min().item()
        negative = largest > least if levels == "below" else least > largest
        if not search:
            magnitude = min(format.encode_e4m4((block.abs().max() / 16).item()), 127)
            assert byte == (magnitude + 128 * negative if magnitude else 0)
        assert byte == 0 or (byte > 127) == negative
        scale = cases.format_page()["decode_se3m4"](byte) / 16
        ratios = block * (1 / torch.tensor(scale)) if scale else torch.zeros(32)
        assert found.tolist() == [sum(middle < ratio for middle in middles) for ratio in ratios.tolist()]


@pytest.mark.parametrize("bits", cases.BITS)
def test_codes_are_packed_as_the_format_says(bits):
    codes = torch.randint(0, 2**bits, (3, 2, 32), generator=cases.generator(bits), dtype=torch.uint8)
    planes = reference.pack_codes(codes, bits)
    for row, words in zip(codes.tolist(), planes.tolist(), strict=True):
        bits_of = [[code >> plane & 1 for code in block] for block in row for plane in range(bits)]
        assert [word & 0xFFFFFFFF for word in words] == [sum(bit << j for j, bit in enumerate(of)) for of in bits_of]
    assert torch.equal(reference.unpack_codes(planes, bits), codes)


@pytest.mark.parametrize("bits", cases.BITS)
def test_quantize_picks_the_nearest_level_for_the_decoded_scale(bits):
    for shape in cases.SHAPES:
        weight, codebook = cases.weight(shape), cases.codebook(bits)
        planes, absmax = reference.quantize(weight, codebook)
        blocks = torch.nn.functional.pad(weight, (0, -shape[1] % 32)).unflatten(1, (-1, 32))
        assert absmax.tolist() == [[format.encode_e4m4(v) for v in row] for row in blocks.abs().amax(-1).tolist()]
        scale = reference.decode_e4m4(absmax)[..., None]
        codes = reference.unpack_codes(planes, bits)
        error = (codebook[codes.int()] * scale - blocks).abs()
        best = (codebook * scale[..., None] - blocks[..., None]).abs().amin(-1)
        # Where two levels are as near as float32 can tell, either may be chosen.
        assert (error <= best + 1e-6 * scale).all()


def test_quantize_halfway_goes_to_the_lower_level():
    codebook = torch.tensor([-1.0, -0.5, 0.5, 1.0])
    weight = torch.tensor([[1.0, 0.75, -0.75, 0.0, 0.7500001, -0.7499999] + [0.0] * 26])
    codes = reference.unpack_codes(reference.quantize(weight, codebook)[0], 2)
    assert codes[0, 0, :6].tolist() == [3, 2, 0, 1, 3, 1]


def test_quantize_depends_neither_on_slices_nor_on_strides(monkeypatch):
    weight, codebook = cases.weight((130, 64)), cases.codebook(3)
    whole = reference.quantize(weight, codebook)
    for numbers in (64 * 7, 1):
        monkeypatch.setattr(reference, "QUANTIZE_SLICE", numbers)
        assert all(map(torch.equal, reference.quantize(weight, codebook), whole))
    assert all(map(torch.equal, reference.quantize(weight.t().contiguous().t(), codebook), whole))
    strided = whole[0].t().contiguous().t(), whole[1], codebook, [130, 64], torch.float32
    assert torch.equal(reference.dequantize(*strided), reference.dequantize(*whole, *strided[2:]))


def test_zero_and_tiny_blocks():
    codebook = cases.codebook(4)
    weight = torch.zeros(2, 64)
    weight[1, :32] = 1e-20
    planes, absmax = reference.quantize(weight, codebook)
    assert not absmax.any()
    assert (reference.unpack_codes(planes, 4) == 7).all(), "where the scale is 0, the code is that of 0"
    decoded = reference.dequantize(planes, absmax, codebook, [2, 64], torch.float32)
    assert not decoded.any() and decoded.isfinite().all()


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", cases.SHAPES)
def test_tiles_hold_each_code_where_the_layout_says(shape, bits):
    """Follows the description of the layout for single weights, one lane at a time."""
    planes, absmax, _ = cases.quantized(shape, bits)
    codes = reference.unpack_codes(planes, bits).flatten(1)
    tiles, scales = reference.repack(planes, absmax, bits, shape)
    assert (tuple(tiles.shape), tuple(scales.shape)) == reference.tiled_shapes(*shape, bits)
    rng = cases.generator(*shape, bits)
    for _ in range(20):
        n, k = (int(torch.randint(size, (), generator=rng)) for size in shape)
        row_tile, half_of_rows, g = n // 16, n % 16 // 8, n % 8
        slab, tile, block, t = k // 256, k % 256 // 64, k % 64 // 32, k % 32 // 8
        instruction, half_of_k, neighbour = k % 8 // 4, k % 4 // 2, k % 2
        words = tiles[row_tile, slab, :, 4 * g + t].flatten()[tile * bits : (tile + 1) * bits].tolist()
        words = [word & 0xFFFFFFFF for word in words]
        if bits == 2:
            byte = words[block] >> 8 * (2 * instruction + half_of_k)
            code = (byte >> [0, 2, 4, 6][2 * neighbour + half_of_rows]) & 3
        elif bits == 3:
            bytes_ = [(word >> 8 * (2 * half_of_k + half_of_rows)) & 0xFF for word in words]
            if (block, instruction) == (1, 1):
                pair = (bytes_[2] & 3) | (bytes_[1] & 3) << 2 | (bytes_[0] & 3) << 4
            else:
                pair = bytes_[2 * block + instruction] >> 2
            code = (pair >> 3 * neighbour) & 7
        else:
            index, per_word = 8 * block + 4 * instruction + 2 * half_of_k + half_of_rows, 32 // (2 * bits)
            if index < per_word * bits:
                pair = words[index // per_word] >> (2 * bits * (index % per_word))
            else:
                pair = sum((word >> 30) << (2 * i) for i, word in enumerate(words))
            code = (pair >> (bits * neighbour)) & (2**bits - 1)
        assert code == codes[n, k]
        assert scales[row_tile, slab, g, 2 * (k % 256 // 32) + half_of_rows] == absmax[n, k // 32]


def test_the_default_device_cannot_be_seen():
    """Tables are made at the first call, which may be while the default is meta, as where a model is made."""
    packed, how = cases.random_packed((17, 40), 3), (cases.codebook(3), [17, 40], torch.float32)
    for table in (reference._scales, reference._spread_tables, reference._places):
        table.cache_clear()
    with torch.device("meta"):
        tiles = reference.repack(*packed, 3, [17, 40])
        found = reference.dequantize(*tiles, *how)
    assert torch.equal(found, reference.dequantize(*packed, *how))


def test_each_matrix_has_tiles_of_its_own():
    planes, absmax = cases.random_packed((2, 3, 17, 40), 3)
    tiles = reference.repack(planes, absmax, 3, [17, 40])
    for i, j in ((0, 0), (1, 2)):
        assert all(
            map(torch.equal, reference.repack(planes[i, j], absmax[i, j], 3, [17, 40]), (t[i, j] for t in tiles))
        )
    assert all(map(torch.equal, reference.repack(*tiles, 3, [17, 40], inverse=True), (planes, absmax)))


def test_padding_of_tiles_has_scale_zero():
    planes, absmax, codebook = cases.quantized((17, 257), 3)
    tiles, scales = reference.repack(planes, absmax, 3, [17, 257])
    padded = reference.dequantize(tiles, scales, codebook, [32, 512], torch.float32)
    assert not padded[17:].any() and not padded[:, 288:].any()


@pytest.mark.parametrize(("scaled", "rotated"), cases.TRANSFORMS, ids=["columns", "rotated", "both"])
@pytest.mark.parametrize("shape", [(3, 31), (64, 100), (2, 5, 40)], ids=str)
def test_transformed_weights_are_decoded_as_their_definition_says(shape, scaled, rotated):
    """By matrices in float64, R[i, j] = (-1)**(bits that i and j share) / sqrt(32). So is what x goes through."""
    columns, codebook = cases.columns(shape[-1], scaled), cases.codebook(3)
    packed, in_features = cases.random_packed(shape, 3), shape[-1]
    stored = cases.stored(*packed, codebook, rotated).double()
    block = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(32)] for i in range(32)]).double() * 32**-0.5
    rotation = torch.block_diag(*[block if rotated else torch.eye(32).double()] * packed[1].shape[-1])
    scales = torch.ones(in_features).double()
    if scaled:
        scales *= torch.tensor([format.decode_e4m4(byte) for byte in columns.tolist()])
    expected = (stored @ rotation)[..., :in_features] * scales
    found = reference.dequantize(*packed, codebook, list(shape[-2:]), torch.float32, columns, rotated)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6 * float(stored.abs().max()))
    x = cases.x((3,), in_features, torch.float64)
    of_input = transforms.of_input(x, scales if scaled else None, rotated)
    torch.testing.assert_close(of_input @ stored[..., : of_input.shape[-1]].mT, x @ expected.mT)


@pytest.mark.parametrize("bits", cases.BITS)
def test_searched_scales_have_the_least_error(bits):
    """Of all bytes in reach, by errors in float64; padding counts for nothing."""
    weight, codebook = cases.weight((40, 100)), cases.codebook(bits)
    planes, absmax = reference.quantize(weight, codebook, search=True)
    around = reference.quantize(weight, codebook)[1].int()
    blocks = torch.nn.functional.pad(weight, (0, 28)).unflatten(-1, (-1, 32)).double()

    def errors(scales):
        ratios = blocks / scales[..., None].clamp(min=1e-30)
        nearest = (ratios[..., None] - codebook.double()).abs().argmin(dim=-1)
        squares = (blocks - codebook.double()[nearest] * scales[..., None]).square().flatten(-2)
        squares[:, 100:] = 0
        return squares.unflatten(-1, (-1, 32)).sum(dim=-1)

    chosen = errors(reference.decode_e4m4(absmax).double())
    assert torch.equal(absmax[around == 0], torch.zeros_like(absmax[around == 0]))
    for step in reference.search_steps(signed=False):
        byte = (around + step).clamp(1, 255).to(torch.uint8)
        others = errors(reference.decode_e4m4(byte).double())
        assert (chosen <= others * (1 + 1e-5) + 1e-12)[around > 0].all()
    before = errors(reference.decode_e4m4(around.to(torch.uint8)).double())
    assert chosen.sum() < 0.95 * before.sum()
    dense = reference.dequantize(planes, absmax, codebook, [40, 100], torch.float64)
    torch.testing.assert_close((dense - weight).square().sum(), chosen.sum(), rtol=1e-4, atol=0)


# --- 8-bit inputs ---------------------------------------------------------------------------------


def tokens_by_hand(x, columns):
    """Of docs/format.md the steps of tokens, in NumPy, whose every operation rounds once."""
    f32 = np.float32
    tokens = np.zeros((len(x), format.num_blocks(x.shape[1]) * 32), f32)
    scales = np.array([format.decode_e4m4(byte) for byte in columns.tolist()], f32)
    tokens[:, : x.shape[1]] = x.float().numpy() * scales
    for distance in (1, 2, 4, 8, 16):
        pairs = tokens.reshape(len(x), -1, 2, distance)
        tokens = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(tokens.shape)
    tokens = tokens * f32(32**-0.5)
    most = np.abs(tokens).max(1, keepdims=True)
    inverse = f32(127) * (f32(1) / most)
    return np.where(most >= 2.0**-100, np.rint(tokens * inverse), 0).astype(np.int64), most * f32(1 / 127)


def as_int8_by_hand(x, planes, absmax, codebook, columns, bias):
    """All of them; y float32 ``[M, N]``, and the weight's integers."""
    f32, f64, f16 = np.float32, np.float64, np.float16
    q_x, of_tokens = tokens_by_hand(x, columns)
    bits = codebook.numel().bit_length() - 1
    top = math.floor(math.log2(float(codebook.abs().max())))
    levels = (codebook.double().numpy() * 2.0 ** (14 - top)).astype(f16)
    values = [format.decode_e4m4(byte & 127) * (-1 if byte > 127 else 1) / 16 for byte in range(256)]
    scales = np.array(values)[absmax.numpy()]
    codes = reference.unpack_codes(planes, bits).numpy()
    largest = np.abs(levels[codes].astype(f64) * scales[..., None]).max((1, 2)).astype(f32)
    of_one = np.minimum(f32(127) * (f32(1) / largest), f32(2**15)).astype(f16)
    multipliers = (scales * of_one[:, None].astype(f64)).astype(f16)
    exact = levels[codes].astype(f64) * multipliers[..., None].astype(f64)
    sums = (exact + 1536).astype(f16)  # what HFMA2 gives, rounded once; its low byte is the integer
    q_w = sums.view(np.uint16).astype(np.uint8).view(np.int8).astype(np.int64).reshape(len(codes), -1)
    of_rows = f32(2.0 ** (top - 10)) / of_one.astype(f32)
    y = (q_x @ q_w.T).astype(f32) * of_tokens * of_rows
    return torch.from_numpy(y if bias is None else y + bias.float().numpy()), q_w


INT8_SHAPES = [*cases.SHAPES, (3, 2100)]  # the last one of more products than float32 adds up exactly


def packed_for_int8(shape, bits: int, exponent: int = 0):
    """Any words and any scales, a row without scales, and the levels of ``2**exponent``; column scales."""
    planes, absmax = cases.random_packed(shape, bits)
    if shape[-2] > 2:
        absmax[..., 1, :] = 0
    return (planes, absmax, torch.tensor(codebooks.optimal(bits, signed=True)) * 2.0**exponent), cases.columns(
        shape[-1]
    )


def inputs_for_int8(in_features: int, dtype) -> torch.Tensor:
    """Usual tokens, one of zeros, one with a huge outlier, and one so small that it counts as zeros."""
    x = cases.x((7,), in_features).to(dtype)
    x[1], x[2, in_features // 2] = 0, 3e4
    if dtype != torch.float16:
        x[3] *= 2.0**-110
    return x


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize(
    ("dtype", "exponent"), [(torch.float32, -96), (torch.float16, 0), (torch.bfloat16, 90)], ids=str
)
@np.errstate(divide="ignore", invalid="ignore")  # of tokens and rows of zeros
def test_8_bit_inputs_are_what_the_steps_say(bits, dtype, exponent):
    for shape in INT8_SHAPES:
        packed, columns = packed_for_int8(shape, bits, exponent)
        x = inputs_for_int8(shape[1], dtype)
        for bias in (None, cases.x((), shape[0], dtype)):
            found = reference.gemm_int8(x, *packed, bias, shape[0], columns)
            expected, rows = as_int8_by_hand(x, *packed, columns, bias)
            assert found.dtype == dtype and torch.equal(found, expected.to(dtype)), shape
            tiles = (*reference.repack(*packed[:2], bits, list(shape)), packed[2])
            assert torch.equal(reference.gemm_int8(x, *tiles, bias, shape[0], columns), found)
        assert np.abs(rows).max() <= 127 and (reference.rows_to_int8(*packed, list(shape))[0].numpy() == rows).all()


@np.errstate(divide="ignore", invalid="ignore")  # of rows of zeros
def test_8_bit_inputs_of_experts_are_what_the_steps_say():
    """Of each expert's rows, in order or picked; rows of none are zeros."""
    (planes, absmax, codebook), columns = packed_for_int8((4, 9, 100), 3)
    x, bias, rows = cases.x((8,), 100), cases.x((4,), 9), torch.tensor([7, 0, 0, 3, 5, 6, 1]).int()
    offsets = torch.tensor([0, 2, 2, 3, 6])
    for own_bias, own_rows in ((None, None), (bias, rows)):
        how = own_bias, own_rows, offsets, 9
        found = reference.gemm_experts_int8(x, planes, absmax, codebook, *how, columns)
        inputs = x if own_rows is None else x[own_rows.long()]
        for expert, (first, last) in ((0, (0, 2)), (2, (2, 3)), (3, (3, 6))):
            packed, added = (planes[expert], absmax[expert], codebook), None if own_bias is None else bias[expert]
            expected, _ = as_int8_by_hand(inputs[first:last], *packed, columns, added)
            assert torch.equal(found[first:last], expected)
        assert found.shape == (len(inputs), 9) and not found[6:].any()


def test_8_bit_tokens_are_what_the_steps_say():
    """Of so many numbers that some are next to a half, where any other order of roundings shows."""
    x, columns = cases.x((4000,), 1000), cases.columns(1000)
    found, of_tokens = reference.tokens_to_int8(x, columns)
    expected, of_tokens_by_hand = tokens_by_hand(x, columns)
    assert (found.numpy() == expected).all() and (of_tokens.numpy() == of_tokens_by_hand).all()


@pytest.mark.parametrize("bits", cases.BITS)
def test_8_bit_inputs_are_near_the_product(bits):
    """To half a step of each int8 number, a little more of weights, whose multipliers are numbers of float16."""
    for shape in INT8_SHAPES:
        packed, columns = packed_for_int8(shape, bits)
        x = inputs_for_int8(shape[1], torch.float32)
        stored = cases.stored(*packed, signed=True).double()
        turned = transforms.of_input(x.double(), reference.decode_e4m4(columns).double(), True)
        off_x = turned.abs().amax(-1, keepdim=True) / 127 / 2 * (1 + 1e-5) + turned.abs() * 1e-6
        largest = stored.abs().amax(-1, keepdim=True)
        off_w = largest / 127 / 2 * (1 + 2.0**-9) + stored.abs() * 2.0**-9 + 1e-3 * largest / 127
        bound = off_x @ (stored.abs() + off_w).T + turned.abs() @ off_w.T
        found = reference.gemm_int8(x, *packed, None, shape[0], columns)
        error = (found.double() - turned @ stored.T).abs()
        assert (error <= bound * (1 + 1e-6) + 1e-30).all()


def test_no_number_leaves_int8():
    """Of all scales, largest and other ones, and of levels that round up."""
    absmax = torch.arange(256).byte()[:, None].expand(-1, 2).clone()
    for level in torch.linspace(1, 2, 200):
        codebook = torch.stack([-level, level / 3, level / 2, level])
        for code in (0, 3):
            planes = torch.full((256, 4), -1 if code else 0, dtype=torch.int32)
            rows, of_rows = reference.rows_to_int8(planes, absmax, codebook, [256, 64])
            scaled = reference.decode_scales(absmax[:, 0], True) != 0
            assert (rows[scaled].abs() == 127).all() and not rows[~scaled].any()
            assert of_rows.isfinite().all() and (of_rows > 0).all()


def test_sums_of_int8_are_exact():
    """Of the largest numbers, in any context, also where float32 would round."""
    numbers = torch.full((2, 5000), 127, dtype=torch.int8)
    numbers[1, ::3] = -126
    expected = (numbers.long() @ numbers.long().T).int()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reference._exact_product(numbers, numbers), expected)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_token(wrong):
    packed, columns = packed_for_int8((7, 100), 4)
    x = cases.x((4,), 100)
    expected = reference.gemm_int8(x, *packed, None, 7, columns)
    x[2, 50] = wrong
    found = reference.gemm_int8(x, *packed, None, 7, columns)
    assert found[2].isnan().all() and torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])

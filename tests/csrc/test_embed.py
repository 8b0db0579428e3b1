"""The compiled embed gives the bits of the reference, from planes and from tiles."""

import subprocess
import sys

import cases
import pytest
import torch
from compiled import FORMS, OPS, TRANSFORMS, assert_replayed, to

from hf_kbit.format import reference

# Beside the usual ones: whole octets in part of a block, more than a turn of a warp, several turns and part of one.
SHAPES = [*cases.SHAPES, (40, 24), (200, 96), (33, 1024), (3, 4096), (19, 2600)]


def table(shape, bits, tiled, columns=None, rotated=False, dtype=torch.float32):
    """Words, scales and codebook of any table, and all its rows as the reference decodes them."""
    packed, codebook = cases.random_packed(shape, bits), cases.codebook(bits)
    decoded = reference.dequantize(*packed, codebook, list(shape), dtype, columns, rotated)
    return [*(reference.repack(*packed, bits, list(shape)) if tiled else packed), codebook], decoded


def any_indices(rows: int, count: int) -> torch.Tensor:
    """Some come up again; the first and the last row are among them."""
    indices = torch.randint(0, rows, (count,), generator=cases.generator(rows, count))
    indices[0], indices[-1] = rows - 1, 0
    return indices


@TRANSFORMS
@FORMS
@pytest.mark.parametrize("bits", cases.BITS)
def test_same_bits(device, scaled, rotated, bits, tiled, poison):
    """In the original basis too."""
    for shape in ((7, 33), (19, 40), (21, 1376)) if scaled or rotated else SHAPES:
        columns, indices = cases.columns(shape[1], scaled), any_indices(shape[0], 37)
        for dtype in (*cases.FLOATS, torch.float64):
            packed, decoded = table(shape, bits, tiled, columns, rotated, dtype)
            on_device = to(device, indices, *packed)
            poison(device, decoded[indices].nbytes)
            found = OPS.embed(*on_device, list(shape), dtype, *to(device, columns), rotated)
            assert found.dtype == dtype and found.is_contiguous()
            assert torch.equal(found.cpu(), decoded[indices]), (shape, dtype)


@FORMS
def test_any_indices(device, tiled):
    """Of both dtypes, any shape, none, and with strides."""
    packed, decoded = table((50, 96), 3, tiled)
    on_device, grid = to(device, *packed), any_indices(50, 24).view(2, 3, 4)
    others = grid[0, 0, 0], grid[:0], grid[:, :, :0], grid.permute(2, 0, 1), grid[..., ::2], grid[..., 1]
    for indices in (grid, *others):
        for dtype in (torch.int64, torch.int32):
            found = OPS.embed(indices.to(dtype).to(device), *on_device, [50, 96], torch.float32)
            assert torch.equal(found.cpu(), decoded[indices]) and found.is_contiguous()


@FORMS
@pytest.mark.parametrize("index", [-1, 50, 2**32 + 3, -(2**63)])
def test_an_index_that_is_no_row(index, tiled):
    packed, _ = table((50, 96), 3, tiled)
    for dtype in (torch.int64, torch.int32) if abs(index) < 2**31 else (torch.int64,):
        with pytest.raises(ValueError, match=f"^indices: found {index}, expected 0 to 49$"):
            OPS.embed(torch.tensor([3, index], dtype=dtype), *packed, [50, 96], torch.float32)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("index", [-1, 50, 2**32 + 3])
def test_an_index_that_is_no_row_stops_a_gpu(index, tiled):
    """In a process of its own, which cannot use the GPU afterwards. Row 50 would be in the last tile, as padding."""
    form = "OPS.repack(planes, absmax, 4, [50, 96])" if tiled else "(planes, absmax)"
    code = f"""
import torch, hf_kbit
OPS = torch.ops.hf_kbit
codebook = torch.tensor(hf_kbit.format.codebooks.normal_float(4)).cuda()
planes, absmax = OPS.quantize(torch.randn(50, 96).cuda(), codebook)
found = OPS.embed(torch.tensor([3, {index}]).cuda(), *{form}, codebook, [50, 96], torch.float16)
print("went on", flush=True)
torch.cuda.synchronize()
print("was not stopped")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode and "was not stopped" not in ran.stdout, ran.stdout
    assert "went on" in ran.stdout, ran.stderr  # the host did not wait
    assert "indices: each is 0 to V - 1" in ran.stderr and "device-side assert" in ran.stderr, ran.stderr


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 50, 2_000, 8_000, 40_000])
def test_any_number_of_rows(count, dtype, tiled, poison):
    """From one, which several warps share, to more than all warps of a GPU have in one round."""
    packed, _ = table((300, 2600), 4, tiled)
    on_gpu = to("cuda", *packed)
    indices = any_indices(300, count).cuda()
    decoded = OPS.dequantize(*on_gpu, [300, 2600], dtype)
    poison("cuda", decoded[indices].nbytes)
    assert torch.equal(OPS.embed(indices, *on_gpu, [300, 2600], dtype), decoded[indices])


@pytest.mark.gpu
@FORMS
def test_longer_rows_than_all_warps_take_in_a_turn(tiled):
    shape = [16, 12_000_032]
    planes = torch.randint(-(2**31), 2**31, (16, 2 * shape[1] // 32), dtype=torch.int32, device="cuda")
    absmax = torch.randint(0, 256, (16, shape[1] // 32), dtype=torch.uint8, device="cuda")
    codebook = cases.codebook(2).cuda()
    packed = OPS.repack(planes, absmax, 2, shape) if tiled else (planes, absmax)
    found = OPS.embed(torch.tensor([13, 0], device="cuda"), *packed, codebook, shape, torch.float16)
    for row, expected in zip((13, 0), found, strict=True):
        own = planes[row : row + 1], absmax[row : row + 1]
        assert torch.equal(OPS.dequantize(*own, codebook, [1, shape[1]], torch.float16)[0], expected)


@pytest.mark.gpu
@FORMS
def test_a_graph_reads_indices_anew(tiled):
    packed, _ = table((300, 1056), 4, tiled, dtype=torch.float16)
    on_gpu = to("cuda", *packed)
    inputs = [(torch.randint(0, 300, (70,), generator=cases.generator(seed)).cuda(),) for seed in range(4)]
    assert_replayed(lambda indices: OPS.embed(indices, *on_gpu, [300, 1056], torch.float16), inputs)

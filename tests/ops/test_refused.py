"""What the ops refuse: by a library, if there is one, and by the table, of which fakes and fallbacks are made."""

import re

import cases
import contract
import pytest
import torch
from contract import OPS, on
from torch.autograd import forward_ad

from hf_kbit.format import reference
from hf_kbit.ops import gemm_experts, quantize

N, K = SIZES = 7, 33
EXPERT_WEIGHT = contract.usual((3, N, K), 3, True, True)
ROWS, OFFSETS = torch.tensor([4, 0, 1, 1, 3]).int(), torch.tensor([0, 2, 2, 4]).int()
GIVEN = {"rows": ROWS, "offsets": OFFSETS, "weight": EXPERT_WEIGHT}
RIGHT = {
    call.op: call.arguments
    for call in (
        contract.quantize(3, torch.bfloat16, (2, N, K)),
        contract.dequantize(3, torch.float16, SIZES, True, True),
        contract.embed(3, torch.bfloat16, SIZES, True, True, indices=torch.tensor([[2, 5]])),
        contract.repack(3, SIZES),
        contract.gemm(3, torch.float32, SIZES, True, True),
        contract.gemm_inference(3, torch.float16, SIZES),
        contract.int8_inverses(3, SIZES),
        contract.gemm_int8(3, torch.float16, SIZES),
        contract.encode_trellis(3),
        contract.decode_trellis(3),
        contract.gemm_group([contract.usual(SIZES, 3), contract.usual(SIZES, 3, True, True)]),
        contract.gemm_gradient(3, torch.float32, SIZES, True, True),
        contract.route_experts(2, 2, 3),
        contract.combine_experts(2, 3, N),
        contract.gemm_experts(swiglu=True, x=cases.x((5,), 2 * K), bias=cases.x((3,), N), **GIVEN),
        contract.gemm_experts_int8(x=cases.x((5,), K).half(), bias=cases.x((3,), N).half(), **GIVEN),
        contract.gemm_experts_gradient(grad=cases.x((5,), N), offsets=OFFSETS, weight=EXPERT_WEIGHT),
    )
}
X, GRAD, INDICES = cases.x((5,), K), cases.x((5,), N), torch.tensor([[2, 5]])
PACKED = {name: RIGHT["gemm"][name] for name in ("weight", "absmax", "codebook")}
EXPERTS = {name: RIGHT["gemm_experts"][name] for name in ("weight", "absmax", "codebook")}
PLANES, ABSMAX, CODEBOOK = PACKED.values()
COLUMNS = cases.columns(K)
TRELLIS = RIGHT["decode_trellis"]["trellis"]
TRELLIS_SHAPE = "expected [*, in_features / 16, out_features / 16, 16 * bits] of 1 to 8 bits"
DENSE = "float32, float16, bfloat16 or float64"
SHAPE = "expected [out_features, in_features], both from 1 to 2**48"
REFUSED = [
    ("quantize", {"weight": torch.ones(2, 2).int()}, "weight: found dtype int32, expected float32, float16 or"),
    ("quantize", {"weight": torch.ones(2, 2).double()}, "weight: found dtype float64, expected float32, float16 or"),
    ("quantize", {"weight": torch.ones(32)}, "weight: found shape [32], expected [*, out_features, in_features],"),
    ("quantize", {"weight": torch.ones(0, 32)}, "weight: found shape [0, 32], expected [*, out_features,"),
    ("quantize", {"codebook": CODEBOOK[:7]}, "codebook: found shape [7], expected one dimension of 4, 8, 16 or 32"),
    ("quantize", {"codebook": CODEBOOK[None]}, "codebook: found shape [1, 8], expected one dimension of 4, 8, 16 or"),
    ("quantize", {"codebook": CODEBOOK.half()}, "codebook: found dtype float16, expected float32"),
    ("dequantize", {"weight": PLANES.long()}, "weight: found dtype int64, expected int32"),
    ("dequantize", {"absmax": ABSMAX.float()}, "absmax: found dtype float32, expected uint8"),
    ("dequantize", {"shape": [N, 65]}, "weight: found shape [7, 6], expected [7, 9] for the planes of a [7, 65]"),
    ("dequantize", {"codebook": cases.codebook(4)}, "weight: found shape [7, 6], expected [1, 1, 4, 32, 4] for the"),
    ("dequantize", {"weight": PLANES[None]}, "absmax: found shape [7, 2], expected the leading dimensions of weight"),
    ("dequantize", {"dtype": torch.int32}, f"dtype: found dtype int32, expected {DENSE}"),
    ("dequantize", {"shape": [0, K]}, f"shape: found [0, 33], {SHAPE}"),
    ("dequantize", {"shape": [K]}, f"shape: found [33], {SHAPE}"),
    ("dequantize", {"shape": [2**63 - 1, K]}, f"shape: found [9223372036854775807, 33], {SHAPE}"),
    ("dequantize", {"columns": COLUMNS.float()}, "columns: found dtype float32, expected uint8"),
    ("dequantize", {"columns": cases.columns(64)}, "columns: found shape [64], expected [33]"),
    ("dequantize", {"columns": COLUMNS[None]}, "columns: found shape [1, 33], expected [33]"),
    ("embed", {"indices": torch.ones(2)}, "indices: found dtype float32, expected int64 or int32"),
    ("embed", EXPERTS, "weight: found shape [3, 7, 6], expected one matrix, without leading dimensions"),
    ("embed", {"dtype": torch.int32}, f"dtype: found dtype int32, expected {DENSE}"),
    ("embed", {"shape": [2**48 + 1, K]}, f"shape: found [281474976710657, 33], {SHAPE}"),
    ("repack", {"bits": 6}, "bits: found 6, expected one of 2, 3, 4, 5"),
    ("repack", {"inverse": True}, "weight: found shape [7, 6], expected [1, 1, 3, 32, 4] for the tiles of a [7, 33]"),
    ("repack", {"shape": [2, 2**63 - 1]}, f"shape: found [2, 9223372036854775807], {SHAPE}"),
    ("encode_trellis", {"targets": torch.ones(2, 256).half()}, "targets: found dtype float16, expected float32"),
    ("encode_trellis", {"targets": torch.ones(2, 255)}, "targets: found shape [2, 255], expected [tiles, 256]"),
    ("encode_trellis", {"targets": torch.ones(256)}, "targets: found shape [256], expected [tiles, 256]"),
    *[("encode_trellis", {"bits": wrong}, f"bits: found {wrong}, expected 1 to 8") for wrong in (0, 9, 2**32 + 1)],
    *[("encode_trellis", {"lead": wrong}, f"lead: found {wrong}, expected 1 to 128") for wrong in (0, 129, -1, 2**33)],
    ("decode_trellis", {"trellis": TRELLIS.int()}, "trellis: found dtype int32, expected int16"),
    *[
        ("decode_trellis", {"trellis": wrong}, f"trellis: found shape {[*wrong.shape]}, {TRELLIS_SHAPE}")
        for wrong in (TRELLIS[0], TRELLIS[..., :40], TRELLIS[..., :0], TRELLIS.repeat(1, 1, 3), TRELLIS[0, 0, 0])
    ],
    ("decode_trellis", {"code": "mul"}, "code: found mul, expected 3inst, mcg or mul1"),
    ("decode_trellis", {"dtype": torch.float64}, "dtype: found dtype float64, expected float32, float16 or bfloat16"),
    ("gemm", {"x": X.int()}, f"x: found dtype int32, expected {DENSE}"),
    ("gemm", {"x": torch.tensor(1.0)}, "x: found a scalar, expected [*, in_features]"),
    ("gemm", {"x": X[:, :32]}, "weight: found shape [7, 6], expected [7, 3] for the planes of a [7, 32] weight in 3"),
    ("gemm", EXPERTS, "weight: found shape [3, 7, 6], expected one matrix, without leading dimensions"),
    ("gemm", {"absmax": ABSMAX[:5]}, "absmax: found shape [5, 2], expected [7, 2] for the planes of a [7, 33] weight"),
    ("gemm", {"bias": GRAD[0, :3]}, "bias: found shape [3], expected [7]"),
    ("gemm", {"bias": GRAD[0].half()}, "bias: found dtype float16, expected float32"),
    ("gemm", {"out_features": 2**63 - 1}, f"shape: found [9223372036854775807, 33], {SHAPE}"),
    ("gemm_inference", {"columns": COLUMNS[1:]}, "columns: found shape [32], expected [33]"),
    ("gemm_int8", {"x": X.double()}, "x: found dtype float64, expected float32, float16 or bfloat16"),
    ("gemm_int8", {"bias": GRAD[0]}, "bias: found dtype float32, expected float16"),
    ("gemm_int8", {"columns": COLUMNS[1:]}, "columns: found shape [32], expected [33]"),
    ("gemm_int8", {"inverses": torch.ones(N)}, "inverses: found dtype float32, expected float16"),
    ("gemm_int8", {"inverses": torch.ones(K).half()}, f"inverses: found shape [{K}], expected [{N}]"),
    ("int8_inverses", EXPERTS, "weight: found shape [3, 7, 6], expected one matrix, without leading dimensions"),
    ("int8_inverses", {"shape": [N, 0]}, f"shape: found [{N}, 0], {SHAPE}"),
    ("gemm_int8", EXPERTS, "weight: found shape [3, 7, 6], expected one matrix, without leading dimensions"),
    (
        "gemm_int8",
        {
            **{"x": torch.ones(1, 133_121), "weight": torch.ones(1, 4161 * 3).int(), "bias": None, "out_features": 1},
            **{"absmax": torch.ones(1, 4161).byte(), "columns": torch.ones(133_121).byte()},
        },
        "x: found shape [1, 133121], expected [*, in_features] of 133120 in_features at most for 8-bit inputs",
    ),
    ("gemm_group", {"rotated": [0]}, "weights: found 2, expected as many of each argument but x"),
    ("gemm_group", {"columns": []}, "weights: found 2, expected as many of each argument but x"),
    ("gemm_group", {"inverses": []}, "weights: found 2, expected as many of each argument but x"),
    (
        "gemm_group",
        {"inverses": [torch.ones(N).half(), None]},
        "inverses: found those of a weight that is not rotated, expected none of it",
    ),
    ("gemm_group", {"inverses": [None, torch.ones(N)]}, "inverses: found dtype float32, expected float16"),
    ("gemm_group", {"biases": [None, X]}, "bias: found shape [5, 33], expected [7]"),
    ("gemm_gradient", {"grad": X}, "grad: found shape [5, 33], expected [*, 7]"),
    ("gemm_gradient", {"grad": GRAD.int()}, f"grad: found dtype int32, expected {DENSE}"),
    ("gemm_gradient", {"columns": COLUMNS[1:]}, "columns: found shape [32], expected [33]"),
    ("gemm_gradient", {"shape": [2, 2**63 - 1]}, f"shape: found [2, 9223372036854775807], {SHAPE}"),
    ("route_experts", {"experts": INDICES.float()}, "experts: found dtype float32, expected int64 or int32"),
    ("route_experts", {"experts": INDICES[0]}, "experts: found shape [2], expected [tokens, experts of each]"),
    # 2**13 is what a GPU can count; beyond it would stop with an error of CUDA.
    *[
        ("route_experts", {"num_experts": wrong}, f"num_experts: found {wrong}, expected 1 to 8192")
        for wrong in (0, 2**13 + 1, 2**31)
    ],
    ("combine_experts", {"y": X.int()}, f"y: found dtype int32, expected {DENSE}"),
    ("combine_experts", {"y": X[0]}, "y: found shape [33], expected [rows, out_features]"),
    ("combine_experts", {"places": INDICES}, "places: found dtype int64, expected int32"),
    ("combine_experts", {"places": ROWS}, "places: found shape [5], expected [tokens, experts of each]"),
    ("combine_experts", {"weights": torch.ones(2, 3).half()}, "weights: found dtype float16, expected float32"),
    ("combine_experts", {"weights": torch.ones(2, 2)}, "weights: found shape [2, 2], expected [2, 3]"),
    ("gemm_experts", {"x": X}, "x: found shape [5, 33], expected [tokens, 2 * in_features]"),
    ("gemm_experts", {"x": X[0], "swiglu": False}, "x: found shape [33], expected [tokens, in_features]"),
    ("gemm_experts", {"x": X.int()}, f"x: found dtype int32, expected {DENSE}"),
    ("gemm_experts", PACKED, "weight: found shape [7, 6], expected one leading dimension, that of experts"),
    ("gemm_experts", {"absmax": ABSMAX.expand(4, -1, -1)}, "absmax: found shape [4, 7, 2], expected the leading"),
    ("gemm_experts", {"bias": GRAD[0]}, "bias: found shape [7], expected [3, 7]"),
    ("gemm_experts", {"bias": GRAD[:3].half()}, "bias: found dtype float16, expected float32"),
    ("gemm_experts", {"rows": ROWS.long()}, "rows: found dtype int64, expected int32"),
    ("gemm_experts", {"rows": ROWS[None]}, "rows: found shape [1, 5], expected one dimension"),
    ("gemm_experts", {"offsets": OFFSETS.long()}, "offsets: found dtype int64, expected int32"),
    ("gemm_experts", {"offsets": ROWS}, "offsets: found shape [5], expected [4]"),
    ("gemm_experts_int8", {"x": X.double()}, "x: found dtype float64, expected float32, float16 or bfloat16"),
    ("gemm_experts_int8", {"x": X[0].half()}, "x: found shape [33], expected [tokens, in_features]"),
    ("gemm_experts_int8", PACKED, "weight: found shape [7, 6], expected one leading dimension, that of experts"),
    ("gemm_experts_int8", {"offsets": ROWS}, "offsets: found shape [5], expected [4]"),
    ("gemm_experts_int8", {"rows": ROWS.long()}, "rows: found dtype int64, expected int32"),
    ("gemm_experts_int8", {"columns": COLUMNS[1:]}, "columns: found shape [32], expected [33]"),
    ("gemm_experts_int8", {"inverses": torch.ones(N).half()}, f"inverses: found shape [{N}], expected [3, {N}]"),
    ("gemm_experts_gradient", {"grad": GRAD[0]}, "grad: found shape [7], expected [rows, 7]"),
    ("gemm_experts_gradient", {"grad": X}, "grad: found shape [5, 33], expected [rows, 7]"),
    ("gemm_experts_gradient", {"offsets": ROWS}, "offsets: found shape [5], expected [4]"),
]


@pytest.mark.parametrize("op, wrong, message", REFUSED)
def test_in_the_same_words(op, wrong, message, device):
    said = []
    for place in (device, "meta"):
        with pytest.raises(contract.REFUSALS) as refused:
            getattr(OPS, op)(**on(place, RIGHT[op] | wrong))
        said.append(str(refused.value))
    assert said[0] == said[1] and said[0].startswith(message)


def each_tensor(arguments: dict, change) -> dict[str, dict]:
    """By the name that errors have for a tensor, arguments of which it alone is changed."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found[name] = arguments | {name: change(value)}
        for place, one in enumerate(value if isinstance(value, list) else []):
            if isinstance(one, torch.Tensor):
                found[f"{name}[{place}]"] = arguments | {name: [*value[:place], change(one), *value[place + 1 :]]}
    return found


@pytest.mark.parametrize("op", RIGHT)
def test_every_tensor_is_dense_and_lies_where_the_first_one_does(op):
    for name, arguments in each_tensor(RIGHT[op], torch.Tensor.to_sparse).items():
        with pytest.raises(
            contract.REFUSALS, match=re.escape(f"{name}: found layout sparse_coo, expected a dense tensor")
        ):
            getattr(OPS, op)(**arguments)
    (first, _), *others = each_tensor(RIGHT[op], lambda tensor: tensor.to("meta")).items()
    for name, arguments in others:
        message = f"{name}: found on meta, expected on cpu like {first}: call model.to"
        with pytest.raises(contract.REFUSALS, match=re.escape(message)):
            getattr(OPS, op)(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in RIGHT if len(each_tensor(RIGHT[op], torch.Tensor.cpu)) > 1])
def test_no_tensor_may_lie_on_another_device(op):
    for arguments in each_tensor(on("cuda", RIGHT[op]), torch.Tensor.cpu).values():
        with pytest.raises(contract.REFUSALS, match=r": found on c.*, expected on c.* like "):
            getattr(OPS, op)(**arguments)


# --- numbers in tensors, which a CPU alone looks at -----------------------------------------------

BOTH = pytest.mark.parametrize("ops", [OPS, reference], ids=["op", "reference"])


def refuse(ops, op: str, match: str, **wrong) -> None:
    """Of the library, and as the reference says it."""
    with pytest.raises((ValueError, IndexError, RuntimeError), match=match):
        getattr(ops, op)(*(RIGHT[op] | wrong).values())


@BOTH
def test_an_index_that_is_no_row(ops):
    """From 7 to 15 there is padding in the tile."""
    for call in contract.embed(3, torch.float32, SIZES).forms():
        for index, dtype in [
            (index, dtype) for index in (-1, 7, 16, 2**31 - 1) for dtype in (torch.int64, torch.int32)
        ]:
            indices = torch.tensor([[0, index]], dtype=dtype)
            with pytest.raises(contract.REFUSALS, match=f"^indices: found .*{index}.*, expected 0 to 6$"):
                ops.embed(*(call.arguments | {"indices": indices}).values())
        for index in (2**32 + 3, -(2**63)):
            with pytest.raises(contract.REFUSALS, match=f"indices: found .*{index}"):
                ops.embed(*(call.arguments | {"indices": torch.tensor([3, index])}).values())


@BOTH
@pytest.mark.parametrize("op", ["gemm_experts", "gemm_experts_int8", "gemm_experts_gradient"])
def test_rows_and_offsets_that_are_not_there(ops, op):
    """Also where there are no rows, of which zeros alone are right."""
    for wrong in ([0, 3, 2, 5], [0, 3, 5, 6], [1, 3, 5, 5], [5, 3, 2, 0]):
        refuse(ops, op, "offsets: found", offsets=torch.tensor(wrong).int())
    first = next(iter(RIGHT[op]))
    empty = {first: RIGHT[op][first][:0], "offsets": torch.zeros(4).int()}
    ways = [empty] if "gradient" in op else [empty | {"rows": None}, {"rows": ROWS[:0], "offsets": empty["offsets"]}]
    for way in ways:
        (found,) = contract.as_list(getattr(ops, op)(*(RIGHT[op] | way).values()))
        assert found.shape == (0, K if "gradient" in op else N)
        for wrong in ([1, 0, 0, 0], [0, 0, 0, 1], [0, -1, 0, 0], [-1, 0, 0, 0]):
            refuse(ops, op, "offsets: found", **way | {"offsets": torch.tensor(wrong).int()})
    for row in (-1, 5) if "rows" in RIGHT[op] else ():
        refuse(ops, op, "rows: found", rows=torch.full((5,), row).int())


def test_places_that_are_no_rows():
    refuse(OPS, "combine_experts", "places: found", places=RIGHT["combine_experts"]["places"] + 6)
    refuse(OPS, "combine_experts", "y: found no rows|out of bounds", y=torch.zeros(0, 0))


# --- by the functions -----------------------------------------------------------------------------


def test_what_is_no_weight():
    for value in (float("nan"), float("inf"), float("-inf")):
        weight = cases.weight((5, 32))
        weight[3, 7] = value
        with pytest.raises(ValueError, match="weight: found 1 NaN or infinite values, expected finite ones"):
            quantize(weight, cases.codebook(3))
    with pytest.raises(TypeError, match=r"weight: found Linear, expected a tensor\. A model is quantized by"):
        quantize(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="codebook: found none, expected float32 levels"):
        quantize(weight)


def test_tangents_of_experts():
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="gemm_experts: found tangents"):
        x = forward_ad.make_dual(RIGHT["gemm_experts"]["x"], torch.ones(5, 2 * K))
        gemm_experts(*(RIGHT["gemm_experts"] | {"x": x}).values())

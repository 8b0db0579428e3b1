"""What every op has: the checks of its arguments, a fake that agrees with it, and what ``torch.library`` asks for."""

import re

import cases
import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

from hf_kbit.format import reference

OPS = torch.ops.hf_kbit
N, K = 7, 33
COLUMNS = cases.columns(K)
PLANES, ABSMAX, CODEBOOK = cases.quantized((N, K), 3, columns=COLUMNS, rotated=True)
PACKED = {"weight": PLANES, "absmax": ABSMAX, "codebook": CODEBOOK}
EXPERTS = PACKED | {"weight": PLANES.expand(3, -1, -1).contiguous(), "absmax": ABSMAX.expand(3, -1, -1).contiguous()}
TRANSFORM = {"columns": COLUMNS, "rotated": True}
X, GRAD, OFFSETS = cases.x((5,), K), cases.x((5,), N), torch.tensor([0, 2, 2, 4]).int()
INDICES, ROWS = torch.tensor([[2, 5]]), torch.tensor([4, 0, 1, 1, 3]).int()

# Arguments that are right; tensors of float are trained where they can be.
RIGHT = {
    "quantize": {"weight": cases.weight((2, N, K), torch.bfloat16), "codebook": CODEBOOK},
    "dequantize": PACKED | {"shape": [N, K], "dtype": torch.float16} | TRANSFORM,
    "embed": {"indices": INDICES} | PACKED | {"shape": [N, K], "dtype": torch.bfloat16} | TRANSFORM,
    "repack": {"weight": PLANES, "absmax": ABSMAX, "bits": 3, "shape": [N, K]},
    "gemm": {"x": X} | PACKED | {"bias": cases.x((), N), "out_features": N} | TRANSFORM,
    "gemm_inference": {"x": X.half()} | PACKED | {"bias": None, "out_features": N},
    "int8_inverses": PACKED | {"shape": [N, K]},
    "gemm_int8": {"x": X.half()}
    | PACKED
    | {"bias": cases.x((), N).half(), "out_features": N, "columns": COLUMNS, "inverses": torch.ones(N).half()},
    "gemm_group": {
        "x": X,
        **{name: [PACKED[one]] * 2 for name, one in (("weights", "weight"), ("absmaxes", "absmax"))},
        **{"codebooks": [CODEBOOK] * 2, "biases": [GRAD[0], None], "out_features": [N] * 2},
        **{"columns": [None, COLUMNS], "rotated": [0, 1], "inverses": [None, None]},
    },
    "gemm_gradient": {"grad": GRAD} | PACKED | {"shape": [N, K]} | TRANSFORM,
    "route_experts": {"experts": torch.tensor([[0, 3], [1, 1]]), "num_experts": 3},
    "combine_experts": {
        "y": cases.x((6,), N),
        "places": torch.tensor([[0, 3, 4], [1, 2, 5]]).int(),
        "weights": cases.x((2,), 3),
    },
    "gemm_experts": {"x": cases.x((5,), 2 * K)}
    | EXPERTS
    | {"bias": cases.x((3,), N), "rows": ROWS, "offsets": OFFSETS, "out_features": N}
    | TRANSFORM
    | {"swiglu": True},
    "gemm_experts_int8": {"x": X.half()}
    | EXPERTS
    | {"bias": cases.x((3,), N).half(), "rows": ROWS, "offsets": OFFSETS, "out_features": N}
    | {"columns": COLUMNS, "inverses": torch.ones(3, N).half()},
    "gemm_experts_gradient": {"grad": GRAD} | EXPERTS | {"offsets": OFFSETS, "shape": [N, K]} | TRANSFORM,
}
TRAINED = {"gemm": ("x", "bias"), "gemm_gradient": ("grad",), "combine_experts": ("y", "weights")}
TRAINED |= {"gemm_experts": ("x", "bias"), "gemm_experts_gradient": ("grad",)}


def on(device: str, arguments: dict) -> dict:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)


def tiled(arguments: dict) -> dict:
    """The same with tiles for planes."""
    single, several = ("weight", "absmax"), ("weights", "absmaxes")
    if set(single) <= set(arguments):
        words = reference.repack(*map(arguments.get, single), 3, [N, K])
        return arguments | dict(zip(single, words, strict=True)) | ({"inverse": True} if "bits" in arguments else {})
    if set(several) <= set(arguments):
        words = zip(*(reference.repack(PLANES, ABSMAX, 3, [N, K]) for _ in range(2)), strict=True)
        return arguments | dict(zip(several, map(list, words), strict=True))
    return arguments


@pytest.mark.parametrize("form", ["planes", "tiles"])
@pytest.mark.parametrize("op", RIGHT)
def test_opcheck(op, form, device):
    arguments = RIGHT[op] if form == "planes" else tiled(RIGHT[op])
    if form == "tiles" and arguments is RIGHT[op]:
        pytest.skip("it takes no packed weight")
    arguments = on(device, arguments)
    trained = {name: arguments[name].clone().requires_grad_() for name in TRAINED.get(op, ())}
    opcheck(getattr(OPS, op).default, kwargs=arguments | trained, args=())


# --- what is refused ------------------------------------------------------------------------------

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
def test_refused_by_every_implementation_in_the_same_words(op, wrong, message, device):
    """By a library, if there is one, and by the table, of which fakes and fallbacks are made."""
    said = []
    for place in (device, "meta"):
        with pytest.raises(ValueError) as refused:
            getattr(OPS, op)(**on(place, RIGHT[op] | wrong))
        said.append(str(refused.value))
    assert said[0] == said[1] and said[0].startswith(message)


def places_of(arguments: dict) -> list[tuple[str, str, int | None]]:
    """Of each tensor how errors name it, the argument, and its place where that is a list."""
    places = []
    for name, value in arguments.items():
        several = isinstance(value, list)
        tensors = enumerate(value) if several else [(None, value)]
        places += [
            (f"{name}[{place}]" if several else name, name, place)
            for place, tensor in tensors
            if isinstance(tensor, torch.Tensor)
        ]
    return places


def with_one(arguments: dict, name: str, place: int | None, change) -> dict:
    if place is None:
        return arguments | {name: change(arguments[name])}
    return arguments | {name: [change(value) if i == place else value for i, value in enumerate(arguments[name])]}


@pytest.mark.parametrize("op", RIGHT)
def test_every_tensor_is_dense_and_lies_where_the_first_one_does(op):
    first, *others = places_of(RIGHT[op])
    for shown, *where in (first, *others):
        with pytest.raises(ValueError, match=re.escape(f"{shown}: found layout sparse_coo, expected a dense tensor")):
            getattr(OPS, op)(**with_one(RIGHT[op], *where, torch.Tensor.to_sparse))
    for shown, *where in others:
        message = f"{shown}: found on meta, expected on cpu like {first[0]}: call model.to"
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(OPS, op)(**with_one(RIGHT[op], *where, lambda tensor: tensor.to("meta")))


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in RIGHT if op != "route_experts"])
def test_no_tensor_may_lie_on_another_device(op):
    for _, *where in places_of(RIGHT[op]):
        with pytest.raises(ValueError, match=r": found on c.*, expected on c.* like "):
            getattr(OPS, op)(**with_one(on("cuda", RIGHT[op]), *where, torch.Tensor.cpu))

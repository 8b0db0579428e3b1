"""A walk over torch's own list of functions: each gives for a packed weight what it gives for the decoded one, or says
in one line why not. Nothing changes the weight, and nothing ends the process."""

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator

import cases
import numpy
import pytest
import torch
from torch import nn
from torch.overrides import get_testing_overrides, resolve_name
from torch.utils import dlpack

from hf_kbit import KbitLinear
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.weight.decoded import Decoded
from hf_kbit.weight.tensor import KbitTensor

SIZE, EXPERTS = 64, 2
ONES, IDS = torch.ones(SIZE, SIZE), torch.arange(SIZE)
# What a parameter of that name may be; any other is each of OTHERS in turn.
CHOICES = {
    "dim": [0, 1, -1],
    "dims": [(0, 1), 0],
    "size": [(SIZE, SIZE), (SIZE * SIZE,), 3],
    "shape": [(SIZE * SIZE,), (SIZE, SIZE)],
    "index": [torch.tensor([0, 3]), IDS.expand(SIZE, SIZE), 0],
    "indices": [torch.tensor([0, 3]), (torch.tensor([1]),)],
    "mask": [ONES == 0],
    "value": [1.0, ONES],
    "values": [ONES],
    "exponent": [2, ONES],
    "dtype": [torch.float32, torch.bfloat16, torch.float8_e4m3fn],
    "start": [0, 1],
    "source": [ONES, ONES[:2]],
    "src": [ONES, 1.0],
    "input2": [ONES],
    "kernel_size": [3],
    "output_size": [(4, 4), 4],
    "normalized_shape": [(SIZE,)],
    "weight": [ONES, ONES[0], torch.ones(4, SIZE, 1)],
    "bias": [None, ONES[0]],
    "target": [ONES / 2, IDS],
    "destination": [0, 1],
    "names": [None],
    "memory_format": [torch.contiguous_format],
    "device": ["cpu"],
    "stride": [(SIZE, 1), (1, SIZE)],
    "split_size_or_sections": [16],
    "split_sizes": [[16, SIZE - 16]],
    "diagonal": [0],
    "offset": [0],
    "requires_grad": [False],
    "full_matrices": [False],
    "generator": [None],
    "p": [2, 0.5],
    "pad": [(1, 1)],
    "min": [-0.1],
    "max": [0.1],
}
OTHERS = [torch.rand(SIZE, SIZE) + 0.5, ONES[0], 2, 0.5, torch.ones(2, SIZE, SIZE), torch.ones(3, SIZE, SIZE), IDS]
# What is another thing by design: sizes in bytes are those that are taken, there is no memory of floats, and each
# tensor has an address of its own.
OTHERWISE = {
    "__repr__",
    "element_size",
    "nbytes.__get__",
    "_cdata.__get__",
    "untyped_storage",
    "data_ptr",
    "const_data_ptr",
    "__dlpack__",
}
OTHERWISE = {f"torch.Tensor.{name}" for name in OTHERWISE}
LARGE = ("diagflat", "kron", "lobpcg")  # results of a gigabyte, of several matrices
# Tensors that nobody has filled; a solver that finds another of many solutions.
NOT_TO_COMPARE = ("empty", "lstsq", "resize")


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    experts = KbitProjection(EXPERTS, in_features=SIZE, out_features=SIZE, bits=3)
    experts.load_dense(cases.weight((EXPERTS, SIZE, SIZE)))
    return {
        "matrix": KbitLinear.from_linear(nn.Linear(SIZE, SIZE)).weight.detach(),
        "experts": experts.weight.detach(),
    }


def functions() -> dict[Callable, Callable | None]:
    """All that torch lets a class override, with a function of the same parameters, and all on lists of tensors."""
    foreach = {getattr(torch, name): None for name in dir(torch) if name.startswith("_foreach_")}
    return get_testing_overrides() | foreach


def ways(of_parameters: Callable | None) -> Iterator[Callable]:
    """Arguments of a call, made of a weight: first, as one of a list, in another place, everywhere."""
    if of_parameters is None:
        lists = [], [[ONES, ONES]], [2.0], [[2.0, 2.0]], [[ONES, ONES], [ONES, ONES]], [[ONES, ONES], 0.5]
        for rest in lists:
            yield lambda w, rest=rest: ([w, w], *rest)
            yield lambda w, rest=rest: ([w.new_ones(w.shape)] * 2, [w, w], *rest[1:])
        return
    parameters = list(inspect.signature(of_parameters).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if not needed:
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            yield from (lambda w: (w,), lambda w: (w, w), lambda w: ([w],), lambda w: ("...ij,...kj->...ik", w, w))
        return
    options = [CHOICES.get(p.name, OTHERS) for p in needed[1:]]
    for rest in itertools.islice(itertools.product(*options), 60):
        yield lambda w, rest=rest: (w, *rest)
    for rest in itertools.islice(itertools.product(*options), 12):
        yield lambda w, rest=rest: ([w, w], *rest)
    yield lambda w: (w,) * len(needed)
    for place, first in itertools.product(range(1, len(needed)), OTHERS[:2]):
        others = [[None] if at == place - 1 else values for at, values in enumerate(options)]
        for rest in itertools.islice(itertools.product(*others), 6):
            yield lambda w, rest=rest, place=place, first=first: (first, *rest[: place - 1], w, *rest[place:])


def called(function: Callable, arguments: tuple) -> tuple[object, Exception | None]:
    torch.manual_seed(1)
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error


def same(expected, found) -> bool:
    found = found.dequantize() if isinstance(found, KbitTensor | Decoded) else found
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor) or (expected.shape, expected.dtype) != (found.shape, found.dtype):
            return False
        if expected.layout != torch.strided:
            expected, found = expected.to_dense(), found.to_dense()
        return torch.allclose(expected.to(torch.complex64), found.to(torch.complex64), 1e-4, 1e-5, equal_nan=True)
    if isinstance(expected, list | tuple):
        return len(expected) == len(found) and all(map(same, expected, found))
    return type(expected) is type(found) and (expected == pytest.approx(found, nan_ok=True) or expected == found)


def problem(name: str, function: Callable, way: Callable, packed: KbitTensor, dense: torch.Tensor) -> str:
    """What is wrong with a call that a dense weight lets; nothing if it is right, or refused in one clear line."""
    written, given = dense.clone(), packed.clone()
    expected, _ = called(function, way(written))
    found, error = called(function, way(given))
    if not torch.equal(given.dequantize(), dense):
        return "it has changed the packed weight"
    if error is not None:
        clear = isinstance(error, RuntimeError | TypeError | ValueError) and str(error).startswith("weight: found ")
        return "" if clear and "\n" not in str(error) else f"{type(error).__name__}: {error}"
    if not torch.equal(written, dense):
        return "it has written, and nothing was said"
    compared = name not in OTHERWISE and not any(part in name for part in NOT_TO_COMPARE)
    try:
        return f"{found} in place of {expected}" if compared and not same(expected, found) else ""
    except (RuntimeError, ValueError, TypeError):  # things that cannot be compared, such as devices or hooks
        return "" if type(expected) is type(found) else f"{type(found)} in place of {type(expected)}"


@pytest.mark.parametrize("kind, least", [("matrix", 1000), ("experts", 900)])
def test_each_gives_what_it_gives_of_the_decoded_weight(kind, least):
    packed, problems, count = weights()[kind], {}, 0
    dense = packed.dequantize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function, of_parameters in functions().items():
            name = resolve_name(function) or str(function)
            if kind == "experts" and name.endswith(LARGE):
                continue
            possible = (way for way in ways(of_parameters) if is_possible(function, way, dense))
            if (way := next(possible, None)) is not None:
                count += 1
                if found := problem(name, function, way, packed, dense):
                    problems[name] = found
    assert problems == {}
    assert count > least, "so many are called"


def is_possible(function: Callable, way: Callable, dense: torch.Tensor) -> bool:
    found, error = called(function, way(dense.clone()))
    return error is None and found is not NotImplemented


# --- memory ---------------------------------------------------------------------------------------

MEMORY = {
    "torch.from_dlpack": torch.from_dlpack,
    "numpy.from_dlpack": lambda w: torch.from_numpy(numpy.from_dlpack(w).copy()),
    "numpy.asarray": lambda w: torch.from_numpy(numpy.asarray(w).copy()),
    "numpy()": lambda w: torch.from_numpy(w.numpy()),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "torch.tensor": torch.tensor,
    "torch.asarray": torch.asarray,
    "torch.Tensor": torch.Tensor,
    "as_subclass": lambda w: w.as_subclass(torch.Tensor),
    "set_": lambda w: torch.empty(0).set_(w),
    "nested": lambda w: torch.nested.nested_tensor([w])[0],
    "a parameter's data": lambda w: nn.Parameter(torch.zeros(w.shape)).data.copy_(w),
}
NO_MEMORY = {
    "to_dlpack": dlpack.to_dlpack,
    "untyped_storage().data_ptr()": lambda w: w.untyped_storage().data_ptr(),
    "storage().data_ptr()": lambda w: w.storage().data_ptr(),
    "untyped_storage().tolist()": lambda w: w.untyped_storage().tolist(),
    "untyped_storage()[0]": lambda w: w.untyped_storage()[0],
    "frombuffer": lambda w: torch.frombuffer(w, dtype=torch.float32),
    "memoryview": memoryview,
    "requires_grad": lambda w: nn.Parameter(w).requires_grad_(),
    "clone().requires_grad_()": lambda w: w.clone().requires_grad_(),
}


@pytest.mark.parametrize("kind", ["matrix", "experts"])
def test_memory_is_that_of_the_decoded_weight(kind):
    packed = weights()[kind]
    for name, ask in MEMORY.items():
        for weight in (packed, packed.mT):  # a view is decoded already
            found = ask(weight)
            found = found.dequantize() if isinstance(found, KbitTensor | Decoded) else found
            assert torch.equal(found, weight.dequantize()), name
    for name, ask in NO_MEMORY.items():
        _, error = called(ask, (packed,))
        assert isinstance(error, RuntimeError | TypeError | ValueError), name


READS = {
    "sum": torch.Tensor.sum,
    "clone": torch.Tensor.clone,
    "repr": repr,
    "numpy": lambda x: x.detach().numpy(),
    "product": lambda x: torch.ones(2, SIZE) @ x,
    "tolist": torch.Tensor.tolist,
    "item": lambda x: x[0, 0].item(),
    "save": lambda x: torch.save(x, "/dev/null"),
    "to": lambda x: x.to(torch.bfloat16),
}


@pytest.mark.parametrize("read", READS)
def test_the_inside_of_a_packed_weight_in_a_dense_one_is_refused(read):
    """torch asks no class when ``.data =`` puts it there; until floats are put there again."""
    packed, dense = weights()["matrix"], nn.Linear(SIZE, SIZE).weight
    for value in (packed, nn.Parameter(packed, requires_grad=False)):
        dense.data = value
        with pytest.raises((RuntimeError, TypeError)), torch.no_grad():
            READS[read](dense)
    dense.data = packed.dequantize()
    with torch.no_grad():
        READS[read](dense)


def test_new_tensors_are_dense_and_may_be_written_into():
    packed = weights()["matrix"]
    made = [torch.zeros_like(packed), torch.empty_like(packed), torch.ones_like(packed), torch.rand_like(packed)]
    made += [packed.new_zeros(SIZE, SIZE), packed.new_empty(SIZE, SIZE), packed.new_full((2,), 1.0)]
    made += [packed.float(), packed.half(), packed.bfloat16(), packed.double(), packed.to(torch.float8_e5m2)]
    made += [packed[:0], packed[:, :0], packed[:, 3:50], packed.split(20, 1)[1], packed.T.clone()]
    for tensor in made[:-5]:
        assert type(tensor) is torch.Tensor and not tensor.zero_().float().any()
    for tensor in made[-5:]:
        assert tensor.dequantize().shape == tensor.shape if isinstance(tensor, KbitTensor | Decoded) else True
        assert (tensor.float() + 1).shape == tensor.shape


VIEWS = {
    "t()": torch.Tensor.t,
    "mT": lambda w: w.mT,
    "[3]": lambda w: w[3],
    "[:, 3]": lambda w: w[:, 3],
    "t()[0][1:]": lambda w: w.t()[0][1:],
    "diagonal": torch.Tensor.diagonal,
    "view": lambda w: w.view(2, -1),
    "unbind": lambda w: w.unbind()[0],
    "columns": lambda w: w[:, 3:50],
    "a clone": torch.clone,
    "data": lambda w: w.data,
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_writes_into_views_are_refused(view, inference):
    """They would be lost: a view of a packed weight is decoded."""
    packed = weights()["matrix"]
    before = packed.dequantize()
    with torch.inference_mode(inference):
        for write in (
            torch.Tensor.zero_,
            lambda x: x.mul_(2),
            lambda x: x.__setitem__(0, 1.0),
            lambda x: x.__iadd__(1),
        ):
            with pytest.raises(RuntimeError, match=r"^weight: found .*, expected reads: it is frozen"):
                write(VIEWS[view](packed))
        torch.testing.assert_close(VIEWS[view](packed) * 1.0, VIEWS[view](before) * 1.0)
    assert torch.equal(packed.dequantize(), before)

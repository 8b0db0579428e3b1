"""KbitTensor: code that takes it for a dense weight gets the truth, and what would write into it is refused."""

import copy
import io
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import cases
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from hf_kbit import KbitEmbedding, KbitLinear
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.weight import tensor
from hf_kbit.weight.tensor import KbitTensor

ROWS, WIDTH = 48, 100


def linear(bits=4, transform="rotated", bias=True, dtype=torch.float32, seed=0) -> KbitLinear:
    dense = nn.Linear(WIDTH, ROWS, bias=bias, dtype=dtype)
    with torch.no_grad():
        dense.weight.copy_(cases.weight((ROWS, WIDTH), seed=seed))
    return KbitLinear.from_linear(dense, bits, transform=transform)


def projection() -> KbitProjection:
    made = KbitProjection(3, in_features=WIDTH, out_features=ROWS, bits=3)
    made.load_dense(cases.weight((3, ROWS, WIDTH)))
    return made


# --- what others see ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_it_says_what_the_dense_weight_says(bits, dtype, form):
    weight, dense = linear(bits, dtype=dtype).weight, nn.Linear(WIDTH, ROWS, dtype=dtype).weight
    assert isinstance(weight, nn.Parameter) and not weight.requires_grad
    for ask in ("shape", "dtype", "device", "ndim", "is_meta", "layout"):
        assert getattr(weight, ask) == getattr(dense, ask), ask
    for ask in ("size", "dim", "numel", "nelement", "is_floating_point", "stride", "is_contiguous"):
        assert getattr(weight, ask)() == getattr(dense, ask)(), ask
    taken = sum(part.nbytes for part in weight.file_tensors().values())
    assert form == "tiles" or weight.numel() * weight.element_size() == pytest.approx(taken) == weight.nbytes
    assert repr(weight) == f"KbitTensor(shape=(48, 100), dtype={dtype}, device=cpu, bits={bits})"


READS = {
    "F.linear": lambda w, x, ids: F.linear(x, w),
    "F.linear with a bias": lambda w, x, ids: F.linear(x, w, x.new_ones(ROWS)),
    "x @ w.T": lambda w, x, ids: x @ w.T,
    "x @ w.t()": lambda w, x, ids: x @ w.t(),
    "mm": lambda w, x, ids: torch.mm(x, w.mT),
    "w @ x.T": lambda w, x, ids: w @ x.T,
    "einsum": lambda w, x, ids: torch.einsum("bk,nk->bn", x, w),
    "F.embedding": lambda w, x, ids: F.embedding(ids, w),
    "w[ids]": lambda w, x, ids: w[ids],
    "index_select": lambda w, x, ids: w.index_select(0, ids.flatten()),
    "w[-1]": lambda w, x, ids: w[-1],
    "w[-ids]": lambda w, x, ids: w[-1 - ids],
    "w[1:9, 3:50]": lambda w, x, ids: w[1:9, 3:50],
    "w[:, 32:]": lambda w, x, ids: w[:, 32:],
    "chunk": lambda w, x, ids: w.chunk(3)[1],
    "split": lambda w, x, ids: w.split([5, 20, 23])[2],
    "cat": lambda w, x, ids: torch.cat([w[:5], w[5:]]),
    "sum": lambda w, x, ids: w.sum(0),
    "norm": lambda w, x, ids: w.norm(dim=1),
    "arithmetic": lambda w, x, ids: w * 2 + 1,
    "float": lambda w, x, ids: w.float(),
    "to list": lambda w, x, ids: torch.tensor(w.tolist()),
    "stack": lambda w, x, ids: torch.stack([w, w]),
    "reshape": lambda w, x, ids: w.reshape(4, -1),
    "contiguous": lambda w, x, ids: w.contiguous() + 0,
    "copy into": lambda w, x, ids: torch.empty(ROWS, WIDTH).copy_(w),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("transform", ["rotated", "none"])
def test_reading_it_gives_what_the_decoded_weight_gives(read, transform, form):
    weight, x, ids = linear(transform=transform).weight, cases.x((3,), WIDTH), torch.tensor([[3, 0], [47, 3]])
    found, expected = READS[read](weight, x, ids), READS[read](weight.dequantize(), x, ids)
    found = found.dequantize() if isinstance(found, KbitTensor) else found
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


def test_gradients_go_through_what_reads_it(form):
    layer = linear()
    for read in (lambda x, w: F.linear(x, w), lambda x, w: x @ w.T):
        grads = []
        for weight in (layer.weight, layer.weight.dequantize()):
            x = cases.x((3,), WIDTH).requires_grad_()
            read(x, weight).square().sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads)


WRITES = {
    "zero_": lambda w: w.zero_(),
    "data.zero_": lambda w: w.data.zero_(),
    "detach().fill_": lambda w: w.detach().fill_(1.0),
    "copy_": lambda w: w.copy_(torch.ones(ROWS, WIDTH)),
    "add_": lambda w: w.add_(1.0),
    "data +=": lambda w: w.data.__iadd__(1.0),
    "w[3] = 0": lambda w: w.__setitem__(3, 0.0),
    "data[3] = 0": lambda w: w.data.__setitem__(3, 0.0),
    "init": lambda w: nn.init.normal_(w),
    "out=": lambda w: torch.add(torch.ones(ROWS, WIDTH), 1.0, out=w),
    "_foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "data = floats": lambda w: setattr(w, "data", torch.ones(ROWS, WIDTH)),
    "requires_grad_": lambda w: w.requires_grad_(True),
    "requires_grad =": lambda w: setattr(w, "requires_grad", True),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_into_it_is_refused(write, form):
    weight = linear().weight
    before = weight.dequantize()
    with pytest.raises((RuntimeError, TypeError), match=r"^weight: found .*, expected"), torch.no_grad():
        WRITES[write](weight)
    assert torch.equal(weight.dequantize(), before)


def test_matrices_of_several(form):
    weight = projection().weight
    dense = weight.dequantize()
    assert weight.shape == (3, ROWS, WIDTH) and isinstance(weight[1], KbitTensor)
    for part in (lambda w: w[2], lambda w: w[1:], lambda w: w[:, 16:32], lambda w: w.mT, lambda w: w.chunk(2, 1)[1]):
        found = part(weight)
        assert torch.equal(found.dequantize() if isinstance(found, KbitTensor) else found, part(dense))


def test_compiled_code_takes_it_as_any_parameter(form):
    layer, x = linear(), cases.x((3,), WIDTH)
    for function in (layer, lambda x: F.linear(x, layer.weight)):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    compiled(x)
    for change in (
        lambda: layer.load_state_dict(linear(seed=1).state_dict()),
        lambda: setattr(layer, "weight", linear(seed=2).weight),
        lambda: setattr(layer.weight, "data", linear(seed=3).weight.data),
    ):
        change()
        assert torch.equal(compiled(x), layer(x)), "the weight that is there now"


# --- copies, files, ties --------------------------------------------------------------------------


def model(seed: int) -> nn.Module:
    """A head that is tied to a table, and a linear layer whose exponent is not that of another seed."""
    table, dense = nn.Embedding(40, 64), nn.Linear(64, 24)
    with torch.no_grad():
        for number, layer in enumerate((table, dense)):
            layer.weight.copy_(cases.weight(tuple(layer.weight.shape), seed=seed + number) * 10.0 ** (3 * seed))
    made = nn.Module()
    made.table, made.head = KbitEmbedding.from_embedding(table, bits=3), KbitLinear(64, 40, bits=3)
    made.head.tie_to(made.table)
    made.linear = KbitLinear.from_linear(dense, bits=3)
    return made


def contents(made: nn.Module) -> dict[str, torch.Tensor]:
    """What the model computes with, and what files hold of it."""
    found = {f"{name} decoded": layer.dequantize() for name, layer in made.named_children()}
    for name, layer in made.named_children():
        found |= {f"{name}.{own}": part.clone() for own, part in layer.packed.items()}
    return found | {name: p.detach().clone() for name, p in made.named_parameters() if name.endswith("bias")}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]):
    assert found.keys() == expected.keys()
    assert [name for name, part in expected.items() if not torch.equal(found[name], part)] == []


def assert_tied(made: nn.Module):
    assert made.head.weight is made.table.weight and made.head.parts is made.table.parts is made.head.weight.parts
    x = cases.x((2,), 64, made.head.weight.dtype)
    expected = x @ made.table(torch.arange(40)).T + made.head.bias
    assert (made.head(x) - expected).norm() < 1e-5 * expected.norm()


def through_torch_save(made: nn.Module) -> nn.Module:
    torch.save(made, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state_dict(made: nn.Module) -> nn.Module:
    torch.save(made.state_dict(), file := io.BytesIO())
    file.seek(0)
    other = model(2)
    assert not any(other.load_state_dict(torch.load(file, weights_only=True)))
    return other


WAYS = {
    "state dict": through_state_dict,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
    "torch.save": through_torch_save,
    "cast and back": lambda made: copy.deepcopy(made).to(torch.float64).float(),
}


@pytest.mark.parametrize("assign", [False, True])
def test_one_state_dict_serves_many_layers(assign, form):
    """And what it has of a packed weight stays, when the layer is given another."""
    made = model(1)
    expected, state = contents(made), made.state_dict()
    before = state["linear.weight"].clone()
    for _ in range(2):
        other = model(2)
        assert not any(other.load_state_dict(state, assign=assign))
        assert_same(contents(other), expected)
        other.linear.weight.data = model(0).linear.weight.data
    assert_same(contents(made), expected)
    made.load_state_dict(model(0).state_dict())
    assert torch.equal(state["linear.weight"], before)


def test_state_dicts_of_files(form):
    """By the three tensors that files have: with metadata, which older state dicts had, any; else those alike."""
    made, expected = linear(), linear().dequantize()
    made.load_state_dict({**made.packed, "bias": made.bias})
    assert torch.equal(made.dequantize(), expected)
    other = KbitLinear(WIDTH, ROWS, bits=4, codebook="int", transform="none")
    from_file = type(made.state_dict())({**made.packed, "bias": made.bias})
    from_file._metadata = {"": {"version": 1, "kbit": made.decoding.to_dict()}}
    assert not any(other.load_state_dict(from_file)) and torch.equal(other.dequantize(), expected)
    with pytest.raises(
        RuntimeError, match=r"weight_columns: found dtype torch.uint8 and shape \[100\], expected none"
    ):
        KbitLinear(WIDTH, ROWS, bits=4, transform="none").load_state_dict({**made.packed, "bias": made.bias})


def test_a_state_dict_without_metadata_is_warned_of(form):
    """Once, unless it has what the layers have anyway, as where a training goes on."""

    def warned(made: nn.Module, of: nn.Module) -> list[str]:
        state = {f"{name}.{own}": part for name, layer in of.named_children() for own, part in layer.packed.items()}
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            made.load_state_dict(state, strict=False)
        return [str(warning.message) for warning in found]

    made = model(0)
    (message,) = warned(made, model(1))
    assert message.startswith("load_state_dict: found packed weights without weight_decoding")
    assert warned(made, made) == []


def test_a_tied_weight_is_one(form):
    made = model(0)
    assert sum(1 for _ in made.parameters()) == 4 and len({id(layer.weight) for layer in made.children()}) == 2
    for move in (lambda: made.to("cpu"), lambda: made.table.double(), lambda: made.head.float(), made.cpu):
        move()
        assert_tied(made)
        assert made.head.weight.is_tiled == (form == "tiles")
    for layer in (made.head, made.table):
        with pytest.raises(ValueError, match="weight: found it tied to that of another layer"):
            layer.load_dense(torch.ones(40, 64))
    assert not KbitEmbedding.from_embedding(nn.Embedding(40, 64)).to("cpu").weight.is_tiled, "rows are looked up"


@pytest.mark.parametrize("function", [None, get_ema_avg_fn(0.5)], ids=["mean", "exponential"])
def test_averages_of_a_model_follow_it(function, form):
    made = model(0)
    averaged = AveragedModel(made, avg_fn=function)
    averaged.update_parameters(made)
    made.linear.bias.data += 1
    averaged.update_parameters(made)
    expected = contents(made) | {"linear.bias": made.linear.bias.detach() - 0.5}
    found = contents(averaged.module)
    torch.testing.assert_close(found.pop("linear.bias"), expected.pop("linear.bias"))
    assert_same(found, expected)
    assert_tied(averaged.module)


def test_threads_share_a_model(form):
    """Copying, saving and running it at once gives what one after the other gives."""
    made, x = model(0), cases.x((3,), 64)
    expected, outputs = contents(made), (made.linear(x), made.head(x))
    ways, gate = list(WAYS.values()), threading.Barrier(4)

    def use(number: int) -> None:
        gate.wait()
        other = ways[number % len(ways)](made)
        assert_same(contents(other), expected)
        assert_tied(other)
        assert {layer.weight.is_tiled for layer in other.children()} == {form == "tiles"}
        for layer, output in zip((other.linear, other.head), outputs, strict=True):
            assert torch.equal(layer(x), output)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(16)))


def test_all_of_it_under_inference_mode(form):
    """Which hands on ops that are made of others as they are: moves, casts and views among them."""
    made, x = model(0), cases.x((3,), 64)
    expected, outputs = contents(made), made.linear(x)
    with torch.inference_mode():
        for move in (lambda: made.to("cpu"), lambda: made.to("cpu", torch.float64).float(), made.cpu, made.eval):
            move()
            assert isinstance(made.linear.weight, KbitTensor)
            assert_tied(made)
        torch.testing.assert_close(made.linear(x), outputs)
        torch.testing.assert_close(x @ made.linear.weight.T + made.linear.bias, outputs)
        with pytest.raises(RuntimeError, match=r"^weight: found .*, expected"):
            made.linear.weight.mul_(2.0)
    assert_same(contents(made), expected)


def test_empty_ones_decode_to_zeros():
    weight = KbitTensor.empty((2, 3, 40), ScalarDecoding((-1.0, -0.5, 0.5, 1.0), 0, "none"), torch.float16)
    assert weight.dtype == torch.float16 and not weight.dequantize().any()


def test_training_what_was_loaded_under_inference_mode():
    with torch.inference_mode():
        layer = linear()
    x = cases.x((3,), WIDTH).requires_grad_()
    with torch.no_grad():
        assert layer(x).isfinite().all()
    with pytest.raises(ValueError, match="KbitLinear: weight: found one that was made under"):
        layer(x)


def test_received_where_a_backend_has_no_work_to_wait_for(form):
    """As NCCL, unless it is asynchronous: what comes back then points nowhere, and to wait for it ends the process."""

    class Work:
        def wait(self):
            return True

    def broadcast(tensors, group, root, root_tensor, asynchronous=True, timeout=-1):
        tensors[0].copy_(other.weight.as_floats())
        return tensors, Work() if asynchronous else None

    other, x = linear(bias=False), cases.x((2,), WIDTH)
    receive = tensor.OPS[torch.ops.c10d.broadcast_.default]
    for how in ((), (True,), (False,), (False, 1000)):
        layer = linear(bias=False, seed=1)
        (received,), work = receive(broadcast, [layer.weight.data], None, 0, 0, *how)
        assert work.wait() and torch.equal(received.dequantize(), other.dequantize())
        assert torch.equal(layer(x), other(x))

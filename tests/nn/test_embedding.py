"""KbitEmbedding: rows of a packed table, also of classes with a look-up of their own, and what is tied to it."""

import copy
import pickle

import cases
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_kbit import KbitLinear
from hf_kbit.format import reference
from hf_kbit.nn.embedding import KbitEmbedding, is_table

ROWS, WIDTH = 130, 100
TRANSFORMS = pytest.mark.parametrize("transform", ["rotated", "none"])


def dense(dtype=torch.float32, padding_idx=None) -> nn.Embedding:
    embedding = nn.Embedding(ROWS, WIDTH, padding_idx, dtype=dtype)
    embedding.weight.data = cases.weight((ROWS, WIDTH), dtype)
    return embedding


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(ROWS, shape, generator=cases.generator(*shape))


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("dtype", cases.FLOATS)
@TRANSFORMS
def test_looks_up_what_it_decodes_to(bits, dtype, transform):
    table = KbitEmbedding.from_embedding(dense(dtype), bits=bits, transform=transform)
    assert isinstance(table, nn.Embedding) and (table.num_embeddings, table.embedding_dim) == (ROWS, WIDTH)
    for shape in [(), (7,), (2, 3), (0,)]:
        found = table(ids(*shape))
        assert found.dtype == dtype and torch.equal(found, F.embedding(ids(*shape), table.dequantize()))
    assert not found.requires_grad and not any(parameter.requires_grad for parameter in table.parameters())
    as_linear = KbitLinear(WIDTH, ROWS, bits=bits, transform=transform)
    as_linear.load(as_linear.quantize(dense(dtype).weight, columns=table.weight.columns))
    assert all(map(torch.equal, table.packed.values(), as_linear.packed.values())), "packed as a linear weight is"
    assert transform == "none" or set(reference.decode_e4m4(table.weight.columns).tolist()) == {1.0}


def test_what_is_no_row_is_refused():
    table = KbitEmbedding.from_embedding(dense())
    for wrong, kind in (([ROWS], ValueError), ([-1], ValueError), ([0.5], TypeError)):
        with pytest.raises(kind, match="indices: found"):
            table(torch.tensor(wrong))


@pytest.mark.parametrize("setting", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_what_is_more_than_a_look_up_is_refused(setting):
    embedding = nn.Embedding(ROWS, WIDTH, **setting)
    assert not is_table(embedding)
    with pytest.raises(ValueError, match=r"embedding: found Embedding.*expected one without max_norm"):
        KbitEmbedding.from_embedding(embedding)


def test_casts_change_what_is_looked_up_and_autocast_does_not():
    table = KbitEmbedding.from_embedding(dense(), bits=3)
    before = {name: tensor.clone() for name, tensor in table.packed.items()}
    assert table.bfloat16()(ids(3)).dtype == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in table.packed.items())
    with torch.autocast("cpu", torch.float16):
        assert table(ids(3)).dtype == F.embedding(ids(3), dense(torch.bfloat16).weight).dtype


# --- classes with a look-up of their own ----------------------------------------------------------


class Scaled(nn.Embedding):
    """As Gemma's, which asks the weight for its dtype."""

    def __init__(self, *args, factor=6.3125, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = nn.Buffer(torch.tensor(factor), persistent=False)
        self.offset = 2

    def forward(self, input_ids):
        return super().forward(input_ids + self.offset) * self.factor.to(self.weight.dtype)


class Normed(nn.Embedding):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids):
        return self.norm(super().forward(input_ids))


class Reading(nn.Embedding):
    def forward(self, input_ids):
        return self.weight[input_ids] + super().forward(input_ids)


class Aside(nn.Embedding):
    def forward(self, input_ids):
        return F.embedding(input_ids, self.weight)


class Heir(Scaled):
    pass


class Foreign(nn.Embedding):
    """Asks another module's weight, which is not packed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.norm = nn.LayerNorm(args[1])

    def forward(self, input_ids):
        return super().forward(input_ids).to(self.norm.weight.dtype)


class Inside(nn.Embedding):
    """Asks in a function of its own."""

    def forward(self, input_ids):
        return (lambda y: y.to(self.weight.dtype))(super().forward(input_ids))


class Keeping(nn.Embedding):
    def _apply(self, fn, recurse=True):
        return self


@pytest.mark.parametrize("kind", [Scaled, Normed, Reading, Aside, Foreign, Inside])
def test_a_class_keeps_its_look_up(kind):
    embedding = kind(ROWS, WIDTH)
    table, few = KbitEmbedding.from_embedding(embedding, bits=5), ids(2, 3) % 64
    assert isinstance(table, kind) and table.training == embedding.training
    expected = copy.deepcopy(embedding)
    expected.weight = nn.Parameter(table.dequantize())
    for other in (table, copy.deepcopy(table), pickle.loads(pickle.dumps(table)), table.to_embedding()):
        assert torch.equal(other(few), expected(few))
    assert type(table.to_embedding()) is kind and not isinstance(table.to_embedding(), KbitEmbedding)
    assert table.state_dict(keep_vars=True).keys() == embedding.state_dict().keys()
    compiled = torch.compile(table, fullgraph=True, backend="eager")
    assert torch.equal(compiled(few), expected(few))
    assert torch.equal(table.bfloat16()(few), expected.bfloat16()(few)), "scaled by a number of that dtype"


class Clashing(nn.Embedding):
    """Has an attribute by a name that a packed weight needs."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lead = 2


@pytest.mark.parametrize("kind", [Heir, Keeping, Clashing])
def test_a_class_that_cannot_be_one_is_left(kind):
    assert not is_table(kind(ROWS, WIDTH))

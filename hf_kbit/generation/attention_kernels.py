"""Two Triton kernels for the attention of one token: parts of the keys each in a program, then the parts together.

Source: Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Blocks of keys that are masked as a
whole are not read, so places of a cache for tokens to come cost next to nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # of a program, which share keys: rows of the smallest product that tensor cores make
SMALLEST = 16  # of its other sides
KEYS = 32  # that a program has at a time
PROGRAMS = 528  # that there are, if there is work for them: an H200 has 132 processors


@triton.jit
def attend_part(
    query,  # [batch, heads, SIZE]
    key,  # [batch, heads / GROUP, length, SIZE]
    value,  # [batch, heads / GROUP, length, VALUE_SIZE]
    mask,  # [batch, length]
    largest,  # of the products; with `total` float32 [batch, heads, parts]
    total,  # of the weights
    weighted,  # sums of values, float32 [batch, heads, parts, VALUE_SIZE]
    scaling,
    length,
    span,  # of the keys of a part
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    part, parts, batch = tl.program_id(0), tl.num_programs(0), tl.program_id(2).to(tl.int64)
    programs: tl.constexpr = (GROUP + HEADS - 1) // HEADS  # that share keys
    shared, first = tl.program_id(1) // programs, tl.program_id(1) % programs * HEADS
    of_group, column, value_at = first + tl.arange(0, HEADS), tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    there = of_group < GROUP
    shared += batch * (tl.num_programs(1) // programs)
    head = shared * GROUP + of_group  # among those of all sequences

    q = tl.load(query + head[:, None] * SIZE + column[None], there[:, None] & (column < SIZE)[None], other=0.0)
    best = tl.full([HEADS], float("-inf"), tl.float32)
    weights = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, VALUE_COLUMNS], tl.float32)
    for start in range(part * span, min((part + 1) * span, length), KEYS):
        row = start + tl.arange(0, KEYS)
        seen = tl.load(mask + batch * length + row, mask=row < length, other=0) != 0
        if tl.max(seen.to(tl.int32), 0) > 0:
            place = (shared * length + row)[:, None]
            k = tl.load(key + place * SIZE + column[None], seen[:, None] & (column < SIZE)[None], other=0.0)
            in_value = seen[:, None] & (value_at < VALUE_SIZE)[None]
            v = tl.load(value + place * VALUE_SIZE + value_at[None], in_value, other=0.0)
            products = tl.dot(q, k.T, input_precision="ieee") * scaling
            products = tl.where(seen[None], products, float("-inf"))
            better = tl.maximum(best, tl.max(products, 1))
            factor, each = tl.exp(best - better), tl.exp(products - better[:, None])
            weights = weights * factor + tl.sum(each, 1)
            sums = sums * factor[:, None]
            # In 16 bits in two parts, or the weights would be rounded.
            rounded = each.to(v.dtype)
            sums = tl.dot(rounded, v, sums, input_precision="ieee")
            if v.dtype != tl.float32:
                sums = tl.dot((each - rounded.to(tl.float32)).to(v.dtype), v, sums)
            best = better
    at = head * parts + part
    tl.store(largest + at, best, mask=there)
    tl.store(total + at, weights, mask=there)
    places = weighted + at[:, None] * VALUE_SIZE + value_at[None]
    tl.store(places, sums, mask=there[:, None] & (value_at < VALUE_SIZE)[None])


@triton.jit
def join_parts(
    largest, total, weighted, output, parts, VALUE_SIZE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """A program for each head of each sequence; ``output``: ``[batch, heads, VALUE_SIZE]``."""
    head = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    each = tl.load(largest + head * parts + part, mask=part < parts, other=float("-inf"))
    factor = tl.exp(each - tl.max(each, 0))
    weights = tl.load(total + head * parts + part, mask=part < parts, other=0.0)
    places = weighted + (head * parts + part[:, None]) * VALUE_SIZE + column[None]
    sums = tl.load(places, mask=(part < parts)[:, None] & (column < VALUE_SIZE)[None], other=0.0)
    result = tl.sum(factor[:, None] * sums, 0) / tl.sum(factor * weights, 0)
    tl.store(output + head * VALUE_SIZE + column, result.to(output.dtype.element_ty), mask=column < VALUE_SIZE)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """As ``attention.attend_one_token``; tensors that are not contiguous, as a cache's are, are copied."""
    (batch, heads, _, size), (_, shared, length, value_size) = query.shape, value.shape
    group = heads // shared
    columns, value_columns = (max(triton.next_power_of_2(each), SMALLEST) for each in (size, value_size))
    keys = KEYS if max(columns, value_columns) <= 128 else KEYS // 2
    programs = batch * shared * -(-group // HEADS)
    parts = min(max(PROGRAMS // programs, 1), -(-length // keys), 128)
    span = -(-length // (parts * keys)) * keys
    parts = -(-length // span)
    largest, total = query.new_empty(2, batch, heads, parts, dtype=torch.float32)
    weighted = query.new_empty(batch, heads, parts, value_size, dtype=torch.float32)
    output = query.new_empty(batch, 1, heads, value_size)
    given = (each.contiguous() for each in (query, key, value, mask.expand(batch, 1, 1, length)))
    attend_part[parts, programs // batch, batch](
        *(*given, largest, total, weighted, scaling, length, span),
        GROUP=group,
        HEADS=HEADS,
        SIZE=size,
        VALUE_SIZE=value_size,
        KEYS=keys,
        COLUMNS=columns,
        VALUE_COLUMNS=value_columns,
    )
    join_parts[(batch * heads,)](
        *(largest, total, weighted, output, parts),
        VALUE_SIZE=value_size,
        PARTS=triton.next_power_of_2(parts),
        COLUMNS=value_columns,
    )
    return output

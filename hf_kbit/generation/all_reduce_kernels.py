"""The Triton kernel of all-reduces: each process writes to where the others read, and waits for what it reads alone.

A number goes to another GPU in 8 bytes: 4 of numbers (two of 16 bits), and 4 that say of which sum they are. Stores
of 8 bytes arrive as a whole, so there is no barrier (source: NCCL's low-latency protocol). A sum writes to one of two
places in turn: a process whose numbers of this sum are here has read all of the sum before the last. The residual and
RMSNorm that follow are part of the kernel. docs/parallel.md has its time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_WORDS = 1024  # of one program that does not look at whole rows
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Loads two words with the numbers of their sums until both are of this one. Past caches that do not see other GPUs.
_AWAIT = tl.constexpr("""{
.reg .pred again;
.reg .b32 first, second;
await_${:uid}:
ld.relaxed.sys.global.v2.b32 {$0, first}, [$2];
ld.relaxed.sys.global.v2.b32 {$1, second}, [$3];
setp.ne.b32 again, first, $4;
@again bra await_${:uid};
setp.ne.b32 again, second, $5;
@again bra await_${:uid};
}""")


@triton.jit
def _low(words, DTYPE: tl.constexpr):
    if DTYPE == tl.float32:
        return words.to(tl.float32, bitcast=True)
    else:
        return (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, DTYPE: tl.constexpr):
    if DTYPE == tl.float32:
        return tl.zeros_like(words).to(tl.float32)
    else:
        return (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _words(low, high, DTYPE: tl.constexpr):
    if DTYPE == tl.float32:
        return low.to(tl.uint32, bitcast=True)
    else:
        low = low.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
        return low | high.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32) << 16


@triton.jit
def _rounded(numbers, DTYPE: tl.constexpr):
    return numbers.to(DTYPE).to(tl.float32)


@triton.jit
def _await(pointers, sum_numbers):
    """The words that other processes store there, once they are of these sums."""
    return tl.inline_asm_elementwise(
        _AWAIT,
        "=&r,=&r,l,l,r,r",
        [pointers, sum_numbers],
        dtype=tl.uint32,
        is_pure=False,
        pack=2,
    )


# Were rows known to begin at multiples of 16 bytes, Triton would have a thread store more words than it awaits, and
# wait for each in two layouts.
@triton.jit(do_not_specialize_on_alignment=["x", "residual", "weight", "out", "normed"])
def sum_over_processes(
    x,  # uint32 [rows, row_words], as all that follow
    residual,
    weight,  # uint32 [row_words]
    out,  # the sums, or with NORM residual + sums
    normed,
    addresses,  # int64 [PROCESSES]: where each reads, uint64 [2, PROCESSES, MOST_WORDS]
    state,  # int32 [2]: the number of the last sum, and how many programs have begun this one
    row_words,
    all_words,
    numbers,  # of a row
    eps,
    PROCESSES: tl.constexpr,
    RANK: tl.constexpr,
    MOST_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    NORM: tl.constexpr,
):
    """One row for each program, row_words up to BLOCK."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    at = row * row_words + column
    there = (column < row_words) & (at < all_words)
    own = tl.load(x + at, there, other=0)
    sum_number = tl.load(state) + 1
    here = tl.load(addresses + RANK).to(tl.pointer_type(tl.uint64))
    # A thread beyond the end waits for what another one does.
    last = tl.minimum(row * row_words + tl.minimum(column, row_words - 1), all_words - 1)
    slot = (sum_number & 1) * (PROCESSES * MOST_WORDS) + last
    tagged = own.to(tl.uint64) | (sum_number.to(tl.uint64) << 32)
    for process in tl.static_range(PROCESSES):
        if process != RANK:
            theirs = tl.load(addresses + process).to(tl.pointer_type(tl.uint64))
            tl.store(theirs + slot + RANK * MOST_WORDS, tagged, there)
    if NORM:
        residual_words = tl.load(residual + at, there, other=0)
        weight_words = tl.load(weight + column, there, other=0)
    tl.debug_barrier()  # all of the program have read the number of the sum
    if tl.num_programs(0) == 1:
        tl.store(state, sum_number)
    elif tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, sum_number)
    low, high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for process in tl.static_range(PROCESSES):  # in one order, so that all have the same bits
        if process == RANK:
            words = own
        else:
            words = _await(here + slot + process * MOST_WORDS, tl.zeros([BLOCK], tl.int32) + sum_number)
        low += _low(words, DTYPE)
        high += _high(words, DTYPE)
    if NORM:
        low = _rounded(_low(residual_words, DTYPE) + _rounded(low, DTYPE), DTYPE)
        high = _rounded(_high(residual_words, DTYPE) + _rounded(high, DTYPE), DTYPE)
        squares = tl.sum(tl.where(there, low * low + high * high, 0.0), 0)
        factor = tl.rsqrt(squares / numbers + eps)
        normed_low = _rounded(low * factor, DTYPE) * _low(weight_words, DTYPE)
        normed_high = _rounded(high * factor, DTYPE) * _high(weight_words, DTYPE)
        tl.store(normed + at, _words(normed_low, normed_high, DTYPE), there)
    tl.store(out + at, _words(low, high, DTYPE), there)


def all_reduce(x: Tensor, buffers) -> Tensor:
    """As the op ``all_reduce``, of what is contiguous, by ``all_reduce.Buffers``."""
    out = torch.empty_like(x)
    _launch(x, buffers, x, x, 0.0, out, None)
    return out


def all_reduce_norm(x: Tensor, buffers, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, normed = torch.empty_like(x), torch.empty_like(x)
    _launch(x, buffers, residual, weight, eps, out, normed)
    return out, normed


def _launch(x, buffers, residual, weight, eps, out, normed) -> None:
    words = x.nbytes // 4
    row_words = words * x.shape[-1] // x.numel() if normed is not None else min(words, PROGRAM_WORDS)
    block = max(triton.next_power_of_2(row_words), 64)  # two words for each thread of a warp
    tensors = x, residual, weight, out, out if normed is None else normed
    sum_over_processes[triton.cdiv(words, row_words),](
        *(tensor.view(-1).view(torch.uint32) for tensor in tensors),
        buffers.addresses,
        buffers.state,
        row_words,
        words,
        x.shape[-1],
        eps,
        PROCESSES=len(buffers.addresses),
        RANK=buffers.rank,
        MOST_WORDS=buffers.most_words,
        BLOCK=block,
        DTYPE=_TYPES[x.dtype],
        NORM=normed is not None,
        num_warps=min(max(block // 128, 1), 32),
    )

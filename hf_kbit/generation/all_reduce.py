"""All-reduce of a few tokens over tensor parallel GPUs, in what ``torch.compile`` compiles, by a kernel of our own.

A decode step has two in each layer, each followed by the residual and a norm, and NCCL takes as long for few bytes as
for many. The kernel, ``all_reduce_kernels.py``, needs GPUs that read each other's memory (torch's symmetric memory).
"""

import os
from operator import getitem
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.fx import Graph, Node

MOST_BYTES = 128 << 10  # of a sum; of more, each GPU would write too much to the others
MOST_ROW_BYTES = 64 << 10  # of a row that one program has, for its norm
DTYPES = torch.bfloat16, torch.float16, torch.float32


class Buffers(NamedTuple):
    """Memory that the processes of a group write for each other."""

    group: ProcessGroup  # a group made after its end may have its name
    addresses: Tensor  # int64 [processes], of the memory of each as this GPU sees it
    state: Tensor  # int32 [2], zeros before the first sum
    rank: int
    most_words: int  # of 4 bytes in a sum
    memory: Tensor  # this process's, which has to stay


_buffers: dict[str, Buffers] = {}  # by the names of groups


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Has code that is compiled from here on sum by the kernel. All processes of the group call it; where one cannot,
    all leave the sums to NCCL."""
    if connected(group):
        return
    _buffers.pop(group.group_name, None)
    if not _on_one_machine(group):
        return
    try:
        buffers = _share_memory(group, device)
    except RuntimeError:  # without NVLink or another way from GPU to GPU, say
        buffers = None
    all_can = torch.tensor(int(buffers is not None), device=device)
    dist.all_reduce(all_can, dist.ReduceOp.MIN, group=group)  # and all memory is zeros from here on
    if all_can:
        _buffers[group.group_name] = buffers
        if config.post_grad_custom_post_pass is None:
            config.post_grad_custom_post_pass = AllReducePass()


def connected(group: ProcessGroup) -> bool:
    """Whether ``all_reduce`` has memory of the group."""
    buffers = _buffers.get(group.group_name)
    return buffers is not None and buffers.group is group


def _share_memory(group: ProcessGroup, device: torch.device) -> Buffers:
    size, words = group.size(), MOST_BYTES // 4
    memory = symmetric_memory.empty(2 * size * words, dtype=torch.int64, device=device).zero_()
    handle = symmetric_memory.rendezvous(memory, group)
    seen = [handle.get_buffer(rank, memory.shape, memory.dtype).data_ptr() for rank in range(size)]
    state = torch.zeros(2, dtype=torch.int32, device=device)
    return Buffers(group, torch.tensor(seen, device=device), state, handle.rank, words, memory)


def _on_one_machine(group: ProcessGroup) -> bool:
    """Whether all processes are on this machine, and see the GPUs of one another."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == dist.get_world_size()
    nvidia = torch.version.hip is None  # whose instructions the kernel has
    return local and nvidia and 1 < group.size() <= torch.cuda.device_count()


class AllReducePass(CustomGraphPass):
    """Replaces small all-reduces over connected processes by ``all_reduce_norm`` where a residual and RMSNorm follow,
    and by ``all_reduce`` elsewhere."""

    def __call__(self, graph: Graph) -> None:
        collectives, replaced = torch.ops._c10d_functional, []
        for node in graph.find_nodes(op="call_function", target=collectives.all_reduce.default):
            wait, *others = node.users
            if others or wait.target is not collectives.wait_tensor.default or not _is_small(node):
                continue
            x, _, group = node.args
            if norm := _norm_after(wait):
                *made, arguments = norm
                with graph.inserting_before(made[0]):
                    both = graph.call_function(torch.ops.hf_kbit.all_reduce_norm.default, (x, *arguments, group))
                    both.meta["val"] = tuple(old.meta["val"] for old in made)
                    for index, old in enumerate(made):
                        new = graph.call_function(getitem, (both, index))
                        new.meta.update(old.meta)
                        old.replace_all_uses_with(new)
            else:
                with graph.inserting_before(node):
                    summed = graph.call_function(torch.ops.hf_kbit.all_reduce.default, (x, group))
                    summed.meta["val"] = wait.meta["val"]
                wait.replace_all_uses_with(summed)
            replaced += wait, node
        graph.eliminate_dead_code()  # norms, but nothing that waits for other processes
        for node in replaced:
            graph.erase_node(node)

    def uuid(self):
        return get_hash_for_files((__file__,), " ".join(sorted(_buffers)))


def _is_small(node: Node) -> bool:
    (_, operation, group), value = node.args, node.meta["val"]
    known = all(isinstance(size, int) for size in value.shape)
    whole_words = value.dtype in DTYPES and known and value.nbytes % 4 == 0
    return operation == "sum" and group in _buffers and whole_words and 0 < value.nbytes <= MOST_BYTES


def _norm_after(summed: Node) -> tuple[Node, Node, tuple] | None:
    """RMSNorm of what a residual and a sum are together: the nodes of both, added and normed, and residual, weight and
    eps. As Llama's has it, and most others: the weight is a factor. Mixtures sum rows in another shape."""
    aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default

    def user(node: Node | None, target) -> Node | None:
        return next((each for each in node.users if each.target is target), None) if node else None

    def converted(node: Node | None, dtype: torch.dtype) -> Node | None:
        return node if node is None or node.meta["val"].dtype == dtype else user(node, convert)

    def other(node: Node, one: Node):
        first, second = node.args
        return second if first is one else first

    def like(node, shape) -> bool:
        found = node.meta.get("val") if isinstance(node, Node) else None
        return isinstance(found, Tensor) and found.dtype == value.dtype and found.shape == shape

    if reshaped := user(summed, aten.reshape.default):
        if len(summed.users) > 1 or reshaped.meta["val"].shape[-1] != summed.meta["val"].shape[-1]:
            return None
        summed = reshaped
    value, added = summed.meta["val"], user(summed, aten.add.Tensor)
    if added is None or len(summed.users) > 1 or added.kwargs or value.shape[-1] * value.element_size() % 4:
        return None
    wide = converted(added, torch.float32)
    square = user(wide, aten.pow.Tensor_Scalar)
    mean = user(square, aten.mean.dim)
    shifted = user(mean, aten.add.Tensor)
    root = user(shifted, aten.rsqrt.default)
    scaled = user(root, aten.mul.Tensor)
    narrow = converted(scaled, value.dtype)
    normed = user(narrow, aten.mul.Tensor)
    if normed is None:
        return None
    residual, weight, eps = other(added, summed), other(normed, narrow), other(shifted, mean)
    as_expected = (
        square.args[1] == 2,
        mean.args[1:] == ([-1], True),
        isinstance(eps, float),
        set(scaled.args) == {wide, root},
        like(residual, value.shape),
        like(weight, value.shape[-1:]) and weight.op == "placeholder",  # there before the sum
        all(len(node.users) == 1 for node in (square, mean, shifted, root, scaled, narrow)),
        value.shape[-1] * value.element_size() <= MOST_ROW_BYTES,
    )
    return (added, normed, (residual, weight, eps)) if all(as_expected) else None


@torch.library.custom_op("hf_kbit::all_reduce", mutates_args=())
def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum over the processes of a group that is connected, of ``x`` of at most ``MOST_BYTES``, in its dtype."""
    if not x.is_cuda:
        collectives = torch.ops._c10d_functional
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", group))
    from hf_kbit.generation import all_reduce_kernels  # Triton is where PyTorch compiles for a GPU

    return all_reduce_kernels.all_reduce(x.contiguous(), _buffers[group])


@all_reduce.register_fake
def _(x, group):
    return x.new_empty(x.shape)


@torch.library.custom_op("hf_kbit::all_reduce_norm", mutates_args=())
def all_reduce_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str) -> tuple[Tensor, Tensor]:
    """``residual`` + the sum of ``x``, with its rows, and RMSNorm of that; weight ``[columns]``, all of a dtype."""
    x = x.reshape(residual.shape)
    if not x.is_cuda:
        added = residual + all_reduce(x, group)
        return added, torch.nn.functional.rms_norm(added.float(), weight.shape, eps=eps).to(x.dtype) * weight
    from hf_kbit.generation import all_reduce_kernels

    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    return all_reduce_kernels.all_reduce_norm(x, _buffers[group], residual, weight, eps)


@all_reduce_norm.register_fake
def _(x, residual, weight, eps, group):
    return x.new_empty(residual.shape), x.new_empty(residual.shape)

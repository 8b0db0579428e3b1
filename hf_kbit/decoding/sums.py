"""Sums over the processes of tensor parallelism, of a few tokens, in what ``torch.compile`` compiles for GPUs.

A step of decoding has two such sums in each layer. NCCL makes of each some kernels and copies, whose time does not
depend on how small it is; a kernel of torch's (symmetric memory) writes this process's part to where the others read
it, waits for theirs, and adds them up. It takes GPUs of one machine that read each other's memory.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.fx import Graph, Node

MOST_BYTES = 128 << 10  # of a sum; of more, each GPU would read too much of the others
_parts: dict[str, Tensor] = {}  # by the names of groups: where this process's part lies for the others to read


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Has code that is compiled from here on sum directly. All processes of the group call it; where one cannot, all
    leave the sums to NCCL."""
    name = group.group_name
    if name in _parts or not _on_one_machine(group):
        return
    try:
        part = symmetric_memory.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(part, group)
    except RuntimeError:  # without NVLink or another way from GPU to GPU, say
        part = None
    all_can = torch.tensor(int(part is not None), device=device)
    dist.all_reduce(all_can, dist.ReduceOp.MIN, group=group)
    if all_can:
        _parts[name] = part
        if config.post_grad_custom_post_pass is None:
            config.post_grad_custom_post_pass = SumDirectly()


def connected(group: ProcessGroup) -> bool:
    """Whether ``sum_directly`` sums over the processes of the group on their GPUs."""
    return group.group_name in _parts


def _on_one_machine(group: ProcessGroup) -> bool:
    """Whether all processes are on this machine, and see the GPUs of one another."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == dist.get_world_size()
    return local and 1 < group.size() <= torch.cuda.device_count()


class SumDirectly(CustomGraphPass):
    """Replaces sums over processes that are connected, of a size that is known and small, by ``sum_directly``."""

    def __call__(self, graph: Graph) -> None:
        collectives = torch.ops._c10d_functional
        for node in graph.find_nodes(op="call_function", target=collectives.all_reduce.default):
            wait, *others = node.users
            if others or wait.target is not collectives.wait_tensor.default or not _is_small(node):
                continue
            x, _, group = node.args
            with graph.inserting_before(node):
                summed = graph.call_function(torch.ops.hf_kbit.sum_directly.default, (x, group))
            summed.meta["val"] = wait.meta["val"]
            wait.replace_all_uses_with(summed)
            graph.erase_node(wait)
            graph.erase_node(node)

    def uuid(self):
        return get_hash_for_files((__file__,), " ".join(sorted(_parts)))


def _is_small(node: Node) -> bool:
    (_, operation, group), value = node.args, node.meta["val"]
    known = all(isinstance(size, int) for size in value.shape)
    return operation == "sum" and group in _parts and known and 0 < value.nbytes <= MOST_BYTES


@torch.library.custom_op("hf_kbit::sum_directly", mutates_args=())
def sum_directly(x: Tensor, group: str) -> Tensor:
    """The sum over the processes of a group that is connected, of ``x`` of at most ``MOST_BYTES``, in its dtype."""
    if not x.is_cuda:
        collectives = torch.ops._c10d_functional
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", group))
    part = _parts[group][: x.nbytes].view(x.dtype).view(x.shape)
    return torch.ops.symm_mem.one_shot_all_reduce_copy(part, x.contiguous(), "sum", group)


@sum_directly.register_fake
def _(x, group):
    return x.new_empty(x.shape)

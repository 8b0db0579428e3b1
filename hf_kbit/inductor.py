"""Makes one launch of the products of one input, such as q, k and v, in what ``torch.compile`` compiles for a GPU.

At a few tokens a good part of a launch is its start and its end. ``ops`` installs this when a product is traced while
Inductor, the default backend, is there; layers and models need not know.
"""

from operator import getitem

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from hf_kbit.codebooks import bits_of
from hf_kbit.reference import is_tiled

MOST_TOKENS, MOST_PRODUCTS = 16, 4  # of one launch: kGemmTokens and kGemmParts in csrc/kernels/gemm_plan.h


def install() -> None:
    """Has Inductor run the pass, unless another has the one place that there is."""
    if config.post_grad_custom_pre_pass is None:
        config.post_grad_custom_pre_pass = JoinProducts()


class JoinProducts(CustomGraphPass):
    """Replaces ``gemm_inference`` nodes of one input and one width by ``gemm_group``."""

    def __call__(self, graph: Graph) -> None:
        order = {node: place for place, node in enumerate(graph.nodes)}
        groups: dict[tuple, list[Node]] = {}
        for node in graph.find_nodes(op="call_function", target=torch.ops.hf_kbit.gemm_inference.default):
            if _takes_one_launch(node):
                x, _, _, codebook, *_ = node.args
                groups.setdefault((x, codebook.meta["val"].shape[0]), []).append(node)
        replaced = []
        for first, *others in groups.values():
            # All happen where the first one does; what they read must be there by then.
            nodes = [first, *(node for node in others if _before(order, node.args[1:5], first))]
            for start in range(0, len(nodes), MOST_PRODUCTS):
                if len(joined := nodes[start : start + MOST_PRODUCTS]) > 1:
                    _join(graph, first, joined)
                    replaced += joined
        for node in replaced:  # only now: what is joined later still goes before the first
            graph.erase_node(node)

    def uuid(self):
        return get_hash_for_files((__file__,))


def _takes_one_launch(node: Node) -> bool:
    x, weight, absmax, codebook = (argument.meta["val"] for argument in node.args[:4])
    tiled = is_tiled(weight, absmax, bits_of(len(codebook)))  # so on a GPU
    known = all(isinstance(size, int) for size in x.shape)
    return tiled and known and x.dtype.itemsize == 2 and 0 < x.numel() <= MOST_TOKENS * x.shape[-1]


def _before(order: dict[Node, int], arguments, node: Node) -> bool:
    return all(argument is None or order[argument] < order[node] for argument in arguments)


def _join(graph: Graph, place: Node, nodes: list[Node]) -> None:
    x = nodes[0].args[0]
    columns = [list(column) for column in zip(*(node.args[1:] for node in nodes), strict=True)]
    with graph.inserting_before(place):
        group = graph.call_function(torch.ops.hf_kbit.gemm_group.default, (x, *columns))
        group.meta["val"] = [node.meta["val"] for node in nodes]
        for index, node in enumerate(nodes):
            product = graph.call_function(getitem, (group, index))
            product.meta.update(node.meta)
            node.replace_all_uses_with(product)

"""Makes one op of the products of one input, such as q, k and v, in what ``torch.compile`` compiles for a GPU.

The op makes them in one launch, of up to 16 tokens or on Hopper. A good part of a launch is its start and its end, and
a weight of few rows leaves most of a GPU idle. ``ops`` installs this when a product is traced while Inductor, the
default backend, is there; layers and models need not know.
"""

from operator import getitem

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from hf_kbit.format.codebooks import bits_of
from hf_kbit.format.reference import is_tiled
from hf_kbit.ops import native

OPS = torch.ops.hf_kbit
TRELLIS = OPS.gemm_trellis_inference.default, OPS.gemm_trellis_int8.default
PRODUCTS = OPS.gemm_inference.default, OPS.gemm_int8.default, *TRELLIS


def install() -> None:
    """Has Inductor run the pass, unless another has the one place that there is, or no library joins products."""
    most_tokens, most_products = native.group_limits()
    if most_products > 1 and config.post_grad_custom_pre_pass is None:
        config.post_grad_custom_pre_pass = JoinProducts(most_tokens, most_products)


class JoinProducts(CustomGraphPass):
    """Replaces ``gemm_inference`` nodes of one input and one width by ``gemm_group``, as many as one takes,
    ``gemm_int8`` nodes likewise, and those of trellises by ``gemm_trellis_group``."""

    def __init__(self, most_tokens: int, most_products: int):
        self.most_tokens, self.most_products = most_tokens, most_products

    def __call__(self, graph: Graph) -> None:
        order = {node: place for place, node in enumerate(graph.nodes)}
        groups: dict[tuple, list[Node]] = {}
        for target in PRODUCTS:
            for node in graph.find_nodes(op="call_function", target=target):
                if _has_tokens(node, self.most_tokens) and (kind := _kind(node)):
                    groups.setdefault((node.args[0], target, *kind), []).append(node)
        replaced = []
        for first, *others in groups.values():
            # All happen where the first one does; what they read must be there by then.
            nodes = [first, *(node for node in others if _before(order, node, first))]
            for start in range(0, len(nodes), self.most_products):
                if len(joined := nodes[start : start + self.most_products]) > 1:
                    _join(graph, first, joined)
                    replaced += joined
        for node in replaced:  # only now: what is joined later still goes before the first
            graph.erase_node(node)

    def uuid(self):
        return get_hash_for_files((__file__,), f"{self.most_tokens} {self.most_products}")


def _has_tokens(node: Node, most_tokens: int) -> bool:
    x = node.args[0].meta["val"]
    known = all(isinstance(size, int) for size in x.shape)
    return known and x.dtype.itemsize == 2 and 0 < x.numel() <= most_tokens * x.shape[-1]


def _kind(node: Node) -> tuple:
    """What products of one op have in common beside x; empty where none takes this one."""
    if node.target in TRELLIS:
        _, _, words, *_, code, block = node.args
        return words.meta["val"].shape[-1], code, block
    weight, absmax, codebook = (argument.meta["val"] for argument in node.args[1:4])
    levels = codebook.shape[0]
    # On a GPU tiles; a group tells 8-bit inputs by their inverses.
    told = node.target != OPS.gemm_int8.default or _arguments(node)[-1] is not None
    return (levels,) if told and is_tiled(weight, absmax, bits_of(levels)) else ()


def _before(order: dict[Node, int], node: Node, place: Node) -> bool:
    return all(order[argument] < order[place] for argument in node.all_input_nodes)


def _arguments(node: Node) -> list:
    """All but x, with those that tracing leaves out because they have their defaults; ``rotated`` as a number, and the
    inverses of 8-bit inputs."""
    _, *packed, bias, out_features = node.args[:6]
    columns, last = [*node.args[6:], *(None, None)][:2]
    is_int8 = node.target == OPS.gemm_int8.default
    rotated, inverses = (True, last) if is_int8 else (bool(last), None)
    return [*packed, bias, out_features, columns, int(rotated), inverses]


def _join(graph: Graph, place: Node, nodes: list[Node]) -> None:
    x, target = nodes[0].args[0], nodes[0].target
    if target in TRELLIS:
        *of_each, shapes, codes, blocks = map(list, zip(*(node.args[1:] for node in nodes), strict=True))
        how = *of_each, [rows for rows, _ in shapes], codes[0], blocks[0], target == OPS.gemm_trellis_int8.default
    else:
        how = map(list, zip(*map(_arguments, nodes), strict=True))
    with graph.inserting_before(place):
        op = OPS.gemm_trellis_group.default if target in TRELLIS else OPS.gemm_group.default
        group = graph.call_function(op, (x, *how))
        group.meta["val"] = [node.meta["val"] for node in nodes]
        for index, node in enumerate(nodes):
            product = graph.call_function(getitem, (group, index))
            product.meta.update(node.meta)
            node.replace_all_uses_with(product)

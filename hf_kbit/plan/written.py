"""Which weights a model's own code writes while it runs, as the source of its classes says it.

A packed weight is frozen, so these layers stay in 16 bits. Looked at are all methods that ``forward`` may reach, by
their names. What is not seen, such as a write by another name of the weight, is refused when it is made.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType

import torch
from torch import nn

from hf_kbit.nn.site import Site

NO_WRITES = ("requires_grad_", "share_memory_", "detach_")
VIEWS = (
    "detach",
    "t",
    "transpose",
    "view",
    "narrow",
    "select",
    "unsqueeze",
    "squeeze",
)  # whose writes reach the weight
Path = tuple[str, ...]  # a name, and what is taken of it, as of ``block.layers[i].weight``; an index is ``INDEX``
INDEX = "[]"


def written(model: nn.Module, sites: Iterable[Site]) -> dict[str, str]:
    """``{name: which method writes it}`` of the weights of these sites.

    >>> class Clamped(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         self.a.weight.data.clamp_(-1, 1)
    ...         return self.b(self.a(x))
    >>> from hf_kbit.nn.site import sites
    >>> written(model := Clamped(), sites(model).values())
    {'a': 'is written by Clamped.forward'}
    """
    methods = {kind: _methods(kind) for kind in {type(module) for module in model.modules()}}
    reached = _reached([function for own in methods.values() for function in own.values()])
    homes, found = {(site.home, site.own): site.name for site in sites}, {}
    weights = {
        f"{place}.{own}".removeprefix("."): homes[module, own]
        for place, module in model.named_modules(remove_duplicate=False)
        for own in module._parameters
        if (module, own) in homes
    }
    for place, module in model.named_modules():
        for method, function in methods[type(module)].items():
            for path in _writes(function) if method in reached else ():
                for weight in filter(_pattern(place, path).fullmatch, weights):
                    found.setdefault(weights[weight], f"is written by {function.__qualname__}")
    return found


def _methods(kind: type[nn.Module]) -> dict[str, FunctionType]:
    """The methods of a class, without those of torch."""
    own = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            functions = {name: inspect.unwrap(value) for name, value in vars(base).items() if callable(value)}
            own |= {name: function for name, function in functions.items() if isinstance(function, FunctionType)}
    return own


def _reached(functions: list[FunctionType]) -> set[str]:
    """Names of methods that ``forward`` may reach."""
    named = {}
    for function in functions:
        named.setdefault(function.__name__, set()).update(_names(function.__code__))
    reached, waiting = set(), {"forward"}
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= (named.get(name, set()) & named.keys()) - reached
    return reached


def _names(code: CodeType) -> set[str]:
    """What code names, with the functions that are made in it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _pattern(place: str, path: Path) -> re.Pattern:
    """For names of weights, of what a method of the module at ``place`` calls ``path``."""
    root, *parts = path
    inside = re.escape(f"{place}.") if place else ""
    anywhere = "" if root == "self" else r"(?:.+\.)?"
    return re.compile(inside + anywhere + r"\.".join(r"[^.]+" if part == INDEX else re.escape(part) for part in parts))


# --- the source of one function -------------------------------------------------------------------


@cache
def _writes(function: Callable) -> tuple[Path, ...]:
    """What a function writes into; nothing where its source is not to be had."""
    if not any(name.endswith("_") or name in ("weight", "data", "out") for name in _names(function.__code__)):
        return ()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ()
    paths = [path for node in ast.walk(tree) for path in _written_by(node)]
    # Of the weight of a variable nothing tells which layer has it.
    return tuple(sorted({path[:end] for path in paths for end in range(2 + (path[0] != "self"), len(path) + 1)}))


def _written_by(node: ast.AST) -> Iterator[Path]:
    """Paths that one node of a syntax tree writes into."""
    targets = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        targets = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
        if node.func.attr.endswith("_") and node.func.attr not in NO_WRITES:
            # x.mul_(...), and init.normal_(x) or torch.clamp_(x)
            targets += [node.func.value] if hasattr(torch.Tensor, node.func.attr) else []
            targets += node.args[:1]
    for target in targets:
        if (path := _path(target)) is not None:
            yield path


def _path(node: ast.AST) -> Path | None:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        path = _path(node.value)
        return None if path is None else (*path, node.attr)
    if isinstance(node, ast.Subscript):
        path = _path(node.value)
        return None if path is None else (*path, INDEX)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
        return _path(node.func.value)
    return None

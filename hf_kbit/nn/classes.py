"""Classes of modules that change in place: a layer of a model gets one of ours while its weight is packed."""

import copy
import functools
from types import MethodType

from torch import nn

MEMBERS = ("_parameters", "_buffers", "_modules")  # what a module has by name


class Changed:
    """A base of our classes that modules of other classes change to, and back.

    Attributes:
        kind: the class of ours.
        plain: the class that the module has otherwise.
        wraps: whether the methods of ours come before those of ``plain``; else these call them.
    """

    kind: type["Changed"]
    plain: type[nn.Module]
    wraps = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "kind" not in vars(cls):
            cls.kind = cls

    def __reduce_ex__(self, protocol):
        own = type(self)
        if own is own.kind:
            return super().__reduce_ex__(protocol)
        return new, (own.plain, own.kind), self.__getstate__()


@functools.cache
def changed(plain: type[nn.Module], kind: type[Changed]) -> type[Changed]:
    """The class that a module of class ``plain`` changes to: ``kind``, or one derived from both."""
    if plain is vars(kind).get("plain"):
        return kind
    bases = (kind, plain) if kind.wraps else (plain, kind)
    # No slots, that is nothing in memory that the plain class has not: so Python lets an object change to this class.
    members = {"__module__": __name__, "__slots__": (), "plain": plain, "kind": kind}
    return type(f"Kbit{plain.__name__}", bases, members)


def new(plain: type[nn.Module], kind: type[Changed]) -> Changed:
    """An empty one, for copies and pickles: derived classes are in no module, where pickle would look."""
    own = changed(plain, kind)
    return own.__new__(own)


def change(module: nn.Module, to: type[nn.Module]) -> None:
    """Gives a module another class, and the forward of that where somebody holds its forward, as accelerate does."""
    before, module.__class__ = type(module).forward, to
    for name in ("forward", "_old_forward"):
        held = vars(module).get(name)
        if isinstance(held, MethodType) and held.__self__ is module and held.__func__ is before:
            vars(module)[name] = MethodType(to.forward, module)


def twin(module: nn.Module) -> nn.Module:
    """Another module of the same tensors and attributes, which can change without this one."""
    made = copy.copy(module)
    for members in MEMBERS:
        setattr(made, members, dict(getattr(module, members)))
    return made

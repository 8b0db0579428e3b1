"""Whether what the tables say of a library holds, and setting the hooks in it."""

import inspect
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import cache

from hf_kbit.hooks import table
from hf_kbit.hooks.importing import after_import
from hf_kbit.hooks.table import Hook, Name


def moved(entries: Iterable[Name | Hook]) -> list[str]:
    """What of these is not as expected, a phrase for each; only libraries that are imported are looked at.

    >>> moved([Name("inspect:getsource", ("object",)), Name("inspect:getsauce")])
    ['inspect:getsauce (found none)']
    """
    problems = []
    for entry in entries:
        try:
            found = pkgutil.resolve_name(entry.place)
        except (ImportError, AttributeError):
            problems.append(f"{entry.place} (found none)")
            continue
        if entry.parameters is not None:
            parameters = tuple(inspect.signature(found).parameters)
            if parameters[: len(entry.parameters)] != entry.parameters:
                expected = ", ".join(entry.parameters)
                problems.append(f"{entry.place} (found parameters {', '.join(parameters)}, expected {expected} first)")
        if isinstance(entry, Hook):
            try:
                pkgutil.resolve_name(entry.wrapper)
            except Exception as error:  # whatever our file says of this library, importing that goes on
                problems.append(f"{entry.place} (found that our {entry.wrapper} does not go with it: {error!r})")
    return problems


def require(library: str, names: Iterable[Name], what: str = "this hf_kbit") -> None:
    """Raises one ImportError that lists all private names of a library that moved, and what relies on them."""
    if problems := moved(names):
        raise ImportError(
            f"{library} {sys.modules[library].__version__}: found names moved that {what} relies on: "
            f"{'; '.join(problems)}. Take a newer hf_kbit, or an older {library}"
        )


# --- setting --------------------------------------------------------------------------------------


def install(library: str, hooks: Iterable[Hook]) -> None:
    """Replaces what the hooks name. Those that moved are left out, with one warning that says what is lost by that."""
    gone = [hook for hook in hooks if moved([hook])]
    for hook in hooks:
        if hook not in gone:
            _install(hook)
    if gone:
        found = "; ".join(moved(gone))
        lost = "; ".join(dict.fromkeys(hook.without for hook in gone))
        version = sys.modules[library].__version__
        warnings.warn(
            f"hf_kbit: {lost}, for in {library} {version} this moved: {found}. Take a newer hf_kbit",
            RuntimeWarning,
            stacklevel=3,
        )


def _install(hook: Hook) -> None:
    original = pkgutil.resolve_name(hook.place)
    if getattr(original, "_is_hook_of_hf_kbit", False):
        return
    wrap = pkgutil.resolve_name(hook.wrapper)
    if hook.everywhere:
        replacement = wrap(original)
        _replace_everywhere(original, replacement)
    else:
        place, _, name = hook.place.replace(":", ".").rpartition(".")
        owner = pkgutil.resolve_name(place)
        method = inspect.getattr_static(owner, name)
        if of_class := isinstance(method, classmethod | staticmethod):
            original = method.__func__
        replacement = wrap(original)
        setattr(owner, name, type(method)(replacement) if of_class else replacement)
    replacement._is_hook_of_hf_kbit = True


def _replace_everywhere(old: Callable, new: Callable) -> None:
    """``from library import function`` copies a name, so every module that has it by then gets the new one."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old and not module.__name__.startswith("hf_kbit."):
                setattr(module, name, new)


@cache
def arm() -> None:
    """Sets the hooks in the libraries that are there, and in others when they are imported. What makes the first
    quantized layer of a process calls it."""
    after_import("transformers.modeling_utils", lambda: install("transformers", table.TRANSFORMERS_HOOKS))
    after_import("accelerate.utils.modeling", lambda: install("accelerate", table.ACCELERATE_HOOKS))
    after_import("peft", install_peft)


def install_generation() -> None:
    """Makes ``generate`` pass all that it is given on to ``hf_kbit.fast_generate``."""
    require("transformers", table.GENERATION_NAMES, "hf_kbit.fast_generate")
    install("transformers", table.GENERATION_HOOKS)


def install_vllm() -> None:
    """Makes vLLM load quantized models."""
    import vllm.model_executor.model_loader  # noqa: F401  which the hook is in

    require("vllm", table.VLLM_NAMES)
    install("vllm", table.VLLM_HOOKS)


def install_peft() -> None:
    """Makes adapters do on quantized layers what PEFT alone cannot. Where that fails, PEFT stays as it is: it trains
    adapters on packed weights as on others, and what would write into these is refused."""
    if problem := _why_not_peft():
        warnings.warn(
            f"hf_kbit: adapters on quantized layers cannot be merged, and their experts not adapted: {problem}",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        install("peft", table.PEFT_HOOKS)


def _why_not_peft() -> str:
    from packaging.version import Version

    version = sys.modules["peft"].__version__
    if Version(version) < Version(table.OLDEST_PEFT):
        return f"found peft {version}, expected {table.OLDEST_PEFT} or newer: pip install -U peft"
    if problems := moved((*table.PEFT_NAMES, *(hook for hook in table.PEFT_HOOKS if not hook.without))):
        return f"found that in peft {version} this moved: {'; '.join(problems)}. Take a newer hf_kbit"
    return ""

"""How Transformers maps the names in a checkpoint to those of a model's tensors, and back when it saves."""

import copy
from collections.abc import Iterable, Mapping

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hf_kbit.files.checkpoint import WEIGHT_SUFFIX
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.site import sites


class Names:
    """Where in a model Transformers loads the tensors of a checkpoint to.

    Args:
        model: on any device, its layers packed or not.
        conversions: those that the checkpoint is loaded by; None: the ones that Transformers has for the model.
    """

    def __init__(self, model, conversions: list[WeightTransform] | None = None):
        # Copies: they remember that they were used, and Transformers saves by those that were.
        transforms = copy.deepcopy(conversions) if conversions is not None else get_model_conversion_mapping(model)
        self._renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self._converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self._by_pattern = {source: c for c in self._converters for source in c.source_patterns}
        self._prefix = model.base_model_prefix
        self._state_dict = model.state_dict()
        # A projection of experts that is not packed has the name of a tensor, and a packed one that of a module.
        projections = (name for name, site in sites(model).items() if site.kind is KbitProjection)
        fused = {name + WEIGHT_SUFFIX: self._state_dict.get(name) for name in projections}
        self._places = fused | self._state_dict

    def targets(self, stored_name: str) -> tuple[list[str], bool]:
        """Names in the model that a stored tensor goes to, and whether it is converted, not only renamed."""
        name, pattern = self._resolve(stored_name, self._converters, self._state_dict)
        if pattern is None:
            return [name], False
        first, *others = self._by_pattern[pattern].target_patterns
        return [name, *(name.replace(first, other) for other in others)], True

    def place(self, stored_name: str) -> int:
        """Which of the tensors that a conversion puts together a stored one is."""
        _, pattern = self._resolve(stored_name, self._converters, self._state_dict)
        return self._by_pattern[pattern].source_patterns.index(pattern)

    def together(self, tensors: Mapping[str, torch.Tensor], model) -> torch.Tensor:
        """What Transformers makes of stored tensors that go to one place in the model, by their names."""
        tensors = dict(sorted(tensors.items(), key=lambda item: dot_natural_key(item[0])))
        for stored_name, tensor in tensors.items():
            target, pattern = self._resolve(stored_name, self._converters, self._state_dict)
            if pattern is None:
                return tensor
            converter = self._by_pattern[pattern]
            converter.add_tensor(target, stored_name, pattern, tensor)
        (made,) = converter.convert(target, model=model, config=model.config).values()
        return made

    def __contains__(self, name: str) -> bool:
        return name in self._state_dict

    def module(self, stored_weight: str) -> str:
        """Name in the model of the module whose packed ``weight`` has that name; packed tensors are only renamed."""
        return self._resolve(stored_weight, [], self._places)[0].removesuffix(WEIGHT_SUFFIX)

    def renamed(self, stored_module: str) -> str:
        """The name of a module as converters find it: renamed, but without the prefix that may be missing."""
        name = f"{stored_module}{WEIGHT_SUFFIX}"
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name.removesuffix(WEIGHT_SUFFIX)

    def _resolve(self, name: str, converters: list, known: dict) -> tuple[str, str | None]:
        """As ``convert_and_load_state_dict_in_model`` of Transformers does."""
        renamed, pattern = rename_source_key(name, self._renamings, converters, self._prefix, known)
        if renamed not in known and name in known:
            return rename_source_key(name, [], [], self._prefix, known)
        return renamed, pattern


def stored_names(model, modules: Iterable[str], others: Iterable[str] = ()) -> dict[str, str]:
    """``{module name: its name in a checkpoint that model.save_pretrained writes}``; the model has no ``others``."""
    tensors = {f"{name}{WEIGHT_SUFFIX}": model.get_submodule(name).weight.detach() for name in modules}
    tensors |= {f"{name}{WEIGHT_SUFFIX}": torch.empty(0) for name in others}
    stored = {id(tensor): name for name, tensor in revert_weight_conversion(model, tensors).items()}
    return {
        name.removesuffix(WEIGHT_SUFFIX): stored[id(tensor)].removesuffix(WEIGHT_SUFFIX)
        for name, tensor in tensors.items()
    }

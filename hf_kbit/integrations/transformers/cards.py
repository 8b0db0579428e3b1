"""The model card of a quantized model: what someone who finds it on the Hub needs to load it."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import wraps

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from yaml import YAMLError

from hf_kbit.integrations.transformers import sealing
from hf_kbit.integrations.transformers.given_state import refuse_other_tensors
from hf_kbit.integrations.transformers.quantizer import with_quantizer
from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.weight import KbitWeight, distinct
from hf_kbit.tensor import KbitTensor

HEADING, FIGURES = "## How to load", "## What quantization cost"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
TAGS = ["kbit"]


def loading_section(model, name: str) -> str:
    """The part of a model card that says how the model is loaded; ``name`` is its directory or Hub repository."""
    architecture = type(model).__name__
    auto_class = "AutoModelForCausalLM" if architecture.endswith("ForCausalLM") else architecture
    tuned = model.hf_quantizer.tuned
    tuned = f"\nTuned after that on the model in 16 bits: {tuned}.\n" if tuned else ""
    return f"""{HEADING}

The {_what(model)} quantized to {widths(model)} with [hf_kbit](https://pypi.org/project/hf_kbit).
{_sizes(model)} After `pip install hf_kbit`:

```python
import hf_kbit  # makes Transformers know the format
from transformers import {auto_class}
model = {auto_class}.from_pretrained({json.dumps(name, ensure_ascii=False)})
```

Without the import, Transformers warns of an unknown quantization type and stops with mismatched sizes.
{tuned}"""


def _what(model) -> str:
    kinds = {"the experts": KbitProjection, "the embeddings": KbitEmbedding}
    found = [what for what, kind in kinds.items() if any(isinstance(layer, kind) for layer in model.modules())]
    *first, last = "linear layers", *found
    return f"{', '.join(first)} and {last} are" if first else f"{last} are"


def widths(model) -> str:
    """``3 bits``, or ``2 to 5 bits (3.40 on average)`` where layers differ."""
    weights = Counter()
    for layer in distinct(module for module in model.modules() if isinstance(module, KbitWeight)):
        weights[layer.bits] += layer.num_weights
    if len(weights) < 2:
        return f"{next(iter(weights), model.config.quantization_config.bits)} bits"
    mean = sum(bits * count for bits, count in weights.items()) / weights.total()
    return f"{min(weights)} to {max(weights)} bits ({mean:.2f} on average)"


def _sizes(model) -> str:
    layers = distinct(module for module in model.modules() if isinstance(module, KbitWeight))
    packed = {id(layer.weight) for layer in layers}
    others = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in packed)
    whole = (KbitTensor.empty(x.weight.shape, x.decoding, x.dense_dtype, "meta").stored() for x in layers)
    stored = sum(tensor.nbytes for tensors in whole for tensor in tensors.values())  # also where processes share it
    weights = sum(layer.num_weights for layer in layers)
    return (
        f"All weights take {(stored + others) / 1e6:,.3g} MB, where they took {(2 * weights + others) / 1e6:,.3g} in "
        f"16 bits; those quantized take {8 * stored / max(weights, 1):.2f} bits each, with scales."
    )


def _of_base(model) -> dict[str, str]:
    """What a card's head can say of the model that was quantized: its name on the Hub, and its licence, if its own
    card is at hand. A quantized model that was loaded says nothing of that."""
    name, quantizer = str(getattr(model, "name_or_path", "")), getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.pre_quantized or not name:
        return {}
    if os.path.isdir(name):
        found, card = {}, os.path.join(name, "README.md")
    elif HUB_NAME.fullmatch(name):
        found = {"base_model": name, "base_model_relation": "quantized"}
        card = try_to_load_from_cache(name, "README.md")
    else:
        return {}
    if not isinstance(card, str) or not os.path.isfile(card):  # which ModelCard would look for on the Hub
        return found
    with suppress(OSError, TypeError, ValueError, YAMLError, RecursionError):  # a card of others
        if isinstance(licence := ModelCard.load(card).data.license, str):
            found["license"] = licence
    return found


def _heading(name: str) -> str:
    """A name as the text of a heading: on one line, and without meaning to Markdown or HTML."""
    return re.sub(r"([\\`*\[\]<>&#|~])", r"\\\1", " ".join(name.split()))


def read_model_card(directory: str | os.PathLike, name: str) -> ModelCard:
    """The ``README.md`` of a model with our tags in it, or a new one.

    Raises:
        ValueError: the README.md that is there has a head that is no YAML, or tags that are no list.
    """
    path = os.path.join(directory, "README.md")
    if os.path.exists(path):
        try:
            card = ModelCard.load(path)
        except (TypeError, ValueError, YAMLError, RecursionError) as error:
            raise ValueError(f"{path}: found a head that is no YAML, expected a model card ({error})") from error
    else:
        card = ModelCard(f"---\n{ModelCardData(library_name='transformers')}\n---\n\n# {_heading(name)}\n")
    tags = card.data.tags or []
    if not isinstance(tags, list):
        raise ValueError(f"{path}: found tags {tags!r}, expected a list")
    card.data.library_name = card.data.library_name or "transformers"
    card.data.tags = [*tags, *(tag for tag in TAGS if tag not in tags)]
    return card


def write_model_card(model, directory: str | os.PathLike, name: str) -> None:
    """Writes ``README.md`` into a saved model, or adds tags and the loading section to the one there.

    Raises:
        ValueError: see ``read_model_card``.
    """
    card = read_model_card(directory, name)
    if not card.data.base_model:  # else the user knows better
        for key, value in _of_base(model).items():
            setattr(card.data, key, getattr(card.data, key, None) or value)
    # Older sections of ours tell of another model.
    card.text = f"{_without(FIGURES, _without(HEADING, card.text))}\n\n{loading_section(model, name)}"
    card.save(os.path.join(directory, "README.md"))


def write_figures(directory: str | os.PathLike, figures: Mapping[str, str]) -> None:
    """Adds what was measured to the card of a saved model, in place of what was there of an earlier measurement.

    Raises:
        ValueError: see ``read_model_card``.
    """
    card = read_model_card(directory, os.path.basename(os.path.abspath(directory)))
    rows = "".join(f"| {_heading(label)} | {_heading(value)} |\n" for label, value in figures.items())
    card.text = f"{_without(FIGURES, card.text)}\n\n{FIGURES}\n\nAs `hf-kbit eval` found:\n\n| | |\n|---|---|\n{rows}"
    card.save(os.path.join(directory, "README.md"))


def _without(heading: str, text: str) -> str:
    """The text without a section, which ends where the next heading begins."""
    return re.sub(rf"^{heading}$.*?(?=^# |^## |\Z)", "", text, flags=re.DOTALL | re.MULTILINE).rstrip()


def card_after_saving(save_pretrained):
    """``save_pretrained`` that writes the card of quantized models, and gives those a quantizer that have none."""

    @wraps(save_pretrained)
    def wrapped(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
        model = with_quantizer(self)
        if _is_kbit(model) and state_dict:
            refuse_other_tensors(model, state_dict)
        writes = _is_kbit(model) and model.should_save_on_this_rank(is_main_process)
        if writes:  # what is wrong with the card is better known before gigabytes are written
            name = os.path.basename(os.path.abspath(save_directory))
            read_model_card(save_directory, name)
        result = save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)
        if writes and os.path.isdir(save_directory):
            sealing.seal(save_directory)
            write_model_card(model, save_directory, name)
        return result

    return wrapped


def card_before_upload(upload):
    """``push_to_hub``'s upload that writes the card of quantized models, with the name that they have there."""

    @wraps(upload)
    def wrapped(self, working_dir, repo_id, *args, **kwargs):
        if _is_kbit(self):  # Transformers has put its own card over ours by now
            sealing.seal(working_dir)
            write_model_card(self, working_dir, repo_id)
        return upload(self, working_dir, repo_id, *args, **kwargs)

    return wrapped


def _is_kbit(model) -> bool:
    adapter_alone = getattr(model, "_hf_peft_config_loaded", False)
    return getattr(model, "quantization_method", None) == "kbit" and not adapter_alone

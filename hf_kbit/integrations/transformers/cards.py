"""The model card of a quantized model: what someone who finds it on the Hub needs to load it."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from transformers import PreTrainedModel
from yaml import YAMLError

from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.weight import KbitWeight, distinct, packed_layers

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
FIGURES = "## What quantization cost"
KINDS = {"the experts": KbitProjection, "the embeddings": KbitEmbedding}


def model_card(model: PreTrainedModel, name: str) -> ModelCard:
    """A card that says how a quantized model is loaded, how wide and how large it is, and of which model it was made.

    ``card.save("README.md")`` writes it, ``card.push_to_hub(name)`` uploads it.

    Args:
        model: a quantized one of Transformers.
        name: of its folder, or of its repository on the Hub.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import hf_kbit
    >>> shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=96, **shape))
    >>> done = hf_kbit.quantize_model(model, bits=3)
    >>> card = model_card(model, "me/model-3bit")
    >>> card.data.tags, "linear layers are quantized to 3 bits" in card.text
    (['kbit'], True)
    """
    architecture, layers = type(model).__name__, distinct(packed_layers(model).values())
    auto_class = "AutoModelForCausalLM" if architecture.endswith("ForCausalLM") else architecture
    found = [what for what, kind in KINDS.items() if any(isinstance(layer, kind) for layer in layers)]
    what = " and ".join(["linear layers", *found])
    quantizer = getattr(model, "hf_quantizer", None)
    calibrated, tuned = (getattr(quantizer, name, "") for name in ("calibrated", "tuned"))
    calibrated = f"\nCalibrated by {_plain(calibrated)}.\n" if calibrated else ""
    tuned = f"\nTuned after that on the model in 16 bits: {tuned}.\n" if tuned else ""
    data = ModelCardData(library_name="transformers", tags=["kbit"], **_of_base(model))
    return ModelCard(f"""---
{data}
---

# {_plain(name)}

The {what} are quantized to {widths(model)} with [hf_kbit](https://pypi.org/project/hf_kbit).
{_sizes(model, layers)} After `pip install hf_kbit`:

```python
import hf_kbit  # makes Transformers know the format
from transformers import {auto_class}
model = {auto_class}.from_pretrained({json.dumps(name, ensure_ascii=False)})
```

Without the import, Transformers warns of an unknown quantization type, and cannot read the quantized layers.
{calibrated}{tuned}""")


def write_figures(file: str | os.PathLike, figures: Mapping[str, str]) -> None:
    """Adds what was measured to a model card, in place of an earlier measurement."""
    text = Path(file).read_text(encoding="utf-8")
    text = re.sub(rf"^{FIGURES}$.*?(?=^# |^## |\Z)", "", text, flags=re.DOTALL | re.MULTILINE).rstrip()
    rows = "".join(f"| {_plain(label)} | {_plain(value)} |\n" for label, value in figures.items())
    text += f"\n\n{FIGURES}\n\nAs `hf-kbit eval` found:\n\n| | |\n|---|---|\n{rows}"
    Path(file).write_text(text, encoding="utf-8")


def widths(model) -> str:
    """``3 bits``, or ``2 to 5 bits (3.40 on average)`` where layers differ."""
    weights = Counter()
    for layer in distinct(packed_layers(model).values()):
        weights[layer.bits] += layer.num_weights
    if len(weights) < 2:
        return f"{next(iter(weights), model.config.quantization_config.bits)} bits"
    mean = sum(bits * count for bits, count in weights.items()) / weights.total()
    return f"{min(weights)} to {max(weights)} bits ({mean:.2f} on average)"


def _sizes(model, layers: list[KbitWeight]) -> str:
    packed = {id(own) for layer in layers for name, own in layer.named_parameters() if name != "bias"}
    others = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in packed)
    stored = sum(tensor.nbytes for layer in layers for tensor in layer.packed.values())
    weights = sum(layer.num_weights for layer in layers)
    return (
        f"All weights take {(stored + others) / 1e6:,.3g} MB, where they took {(2 * weights + others) / 1e6:,.3g} in "
        f"16 bits; those quantized take {8 * stored / max(weights, 1):.2f} bits each, with scales."
    )


def _of_base(model) -> dict[str, str]:
    """The name on the Hub of the model that was quantized, and its licence, if its card is at hand. A quantized model
    that was loaded knows neither."""
    name, quantizer = str(getattr(model, "name_or_path", "")), getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.pre_quantized:
        return {}
    found, card = {}, None
    if os.path.isdir(name):
        card = os.path.join(name, "README.md")
    elif HUB_NAME.fullmatch(name):
        found = {"base_model": name, "base_model_relation": "quantized"}
        card = try_to_load_from_cache(name, "README.md")
    try:
        licence = ModelCard.load(card).data.license if isinstance(card, str) and os.path.isfile(card) else None
    except (OSError, TypeError, ValueError, YAMLError, RecursionError):  # a card of others
        licence = None
    return {**found, "license": licence} if isinstance(licence, str) else found


def _plain(text: str) -> str:
    """Text on one line, without meaning to Markdown or HTML."""
    return re.sub(r"([\\`*\[\]<>&#|~])", r"\\\1", " ".join(text.split()))

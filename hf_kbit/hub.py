"""The model card of a quantized model: what someone who finds it on the Hub needs to load it."""

import os
from functools import partial

from huggingface_hub import ModelCard, ModelCardData

MARKER = "import hf_kbit"
TAGS = ["kbit"]


def loading_section(model, name: str) -> str:
    """The part of a model card that says how the model is loaded; ``name`` is its directory or Hub repository."""
    architecture = type(model).__name__
    auto_class = "AutoModelForCausalLM" if architecture.endswith("ForCausalLM") else architecture
    bits = model.config.quantization_config.bits
    return f"""## How to load

The linear layers are quantized to {bits} bits with [hf_kbit](https://pypi.org/project/hf_kbit). After
`pip install hf_kbit`:

```python
{MARKER}  # makes Transformers know the format
from transformers import {auto_class}
model = {auto_class}.from_pretrained("{name}")
```

Without the import, Transformers warns of an unknown quantization type and stops with mismatched sizes.
"""


def write_model_card(model, directory: str | os.PathLike, name: str) -> None:
    """Writes ``README.md`` into a saved model, or adds tags and the loading section to the one there."""
    path = os.path.join(directory, "README.md")
    if os.path.exists(path):
        card = ModelCard.load(path)
    else:
        card = ModelCard(f"---\n{ModelCardData(library_name='transformers')}\n---\n\n# {name}\n")
    card.data.library_name = card.data.library_name or "transformers"
    card.data.tags = [*(card.data.tags or []), *(tag for tag in TAGS if tag not in (card.data.tags or []))]
    if MARKER not in card.text:
        card.text = f"{card.text.rstrip()}\n\n{loading_section(model, name)}"
    card.save(path)


def attach_model_card(model) -> None:
    """Makes ``model.save_pretrained`` and ``push_to_hub`` write the card; Transformers has no hook for it."""
    model.save_pretrained = partial(_save_pretrained, model)
    model._upload_modified_files = partial(_upload_modified_files, model)


def detach_model_card(model) -> None:
    """Undoes ``attach_model_card``, for a model that is quantized no more."""
    for name in ("save_pretrained", "_upload_modified_files"):
        model.__dict__.pop(name, None)


def _save_pretrained(model, save_directory, is_main_process=True, *args, **kwargs):
    type(model).save_pretrained(model, save_directory, is_main_process, *args, **kwargs)
    if is_main_process and os.path.isdir(save_directory) and not getattr(model, "_hf_peft_config_loaded", False):
        write_model_card(model, save_directory, os.path.basename(os.path.abspath(save_directory)))


def _upload_modified_files(model, working_dir, repo_id, *args, **kwargs):
    # Transformers has put its own card over ours by now.
    write_model_card(model, working_dir, repo_id)
    return type(model)._upload_modified_files(model, working_dir, repo_id, *args, **kwargs)

"""Lets vLLM serve what ``save_pretrained`` wrote: ``vllm serve FOLDER``.

vLLM calls ``register`` in each of its processes, for the package names it as an entry point of
``vllm.general_plugins``. ``config.py`` knows which layers are packed; ``loading.py`` prepares a model for its tensors;
``linear.py``, ``embedding.py`` and ``fused_moe.py`` load and run them.
"""

import warnings

from hf_kbit.hooks import setting


def register() -> None:
    """Makes ``quant_method: kbit`` known to vLLM; may be called again. With a vLLM in which something moved there is a
    warning instead: it may be about to serve a model that is not ours."""
    try:
        setting.install_vllm()
        from hf_kbit.integrations.vllm import config  # noqa: F401  registers itself
    except ImportError as error:
        warnings.warn(f"hf_kbit: quantized models cannot be served: {error}", RuntimeWarning, stacklevel=2)

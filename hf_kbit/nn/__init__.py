"""Layers whose weights are quantized."""

import transformers.modeling_utils  # noqa: F401  by which all hooks are there before there is such a layer

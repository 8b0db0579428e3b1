"""Layers whose weights are quantized."""

import transformers.modeling_utils  # noqa: F401  by which hooks into it and torch are there before there is such a layer

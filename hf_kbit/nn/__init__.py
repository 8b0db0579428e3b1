"""Layers whose weights are quantized."""

import transformers.modeling_utils  # noqa: F401  which the hooks are in that the first such layer sets

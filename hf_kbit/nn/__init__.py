"""Layers whose weights are quantized."""

import transformers  # noqa: F401  by which the hooks into it and into torch are there before there is such a layer

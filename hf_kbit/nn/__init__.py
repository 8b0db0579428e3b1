"""Layers whose weights are quantized."""

"""Packed weights as tensors."""

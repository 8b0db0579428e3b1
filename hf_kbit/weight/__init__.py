"""Packed weights as tensors. Their kinds are imported with any part of it: a weight may come from a file."""

from hf_kbit.weight import scalar, tensor_ops, trellis  # noqa: F401

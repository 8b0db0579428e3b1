"""Layers whose weight is packed."""

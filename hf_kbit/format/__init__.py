"""The stored format: what bytes mean."""

"""A package, so that ``python -m benchmarks.quality.train`` means this folder, whatever else is installed."""

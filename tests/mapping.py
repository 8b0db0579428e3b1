"""Which memory is mapped from files."""

from pathlib import Path

import torch


def is_mapped(tensor: torch.Tensor, folder: Path) -> bool:
    """Whether a tensor of the CPU lies in memory that is mapped from a file in a folder."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line]
    spans = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    return any(start <= tensor.data_ptr() < end for start, end in spans)

"""The device that commands compute on."""

from typing import Annotated

import typer

Device = Annotated[
    str | None,
    typer.Option(
        help="Device to compute on: cpu, cuda or cuda:1. Default: the first GPU, or the CPU if there is none."
    ),
]


def resolve_device(device: str | None) -> str:
    """What ``--device`` says, or a GPU where there is one; a ValueError where torch cannot use the one named."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device: found {device}, but torch can use no GPU; see hf-kbit info")
    return device

"""The model that commands load: options that say which, and in which dtype."""

from typing import Annotated

import typer

DTYPES = ("auto", "float32", "float16", "bfloat16")

Dtype = Annotated[
    str,
    typer.Option(
        help="Dtype of what is not quantized: float32, float16 or bfloat16. auto takes that of the checkpoint."
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of the model on the Hub. Default: its main branch.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Allow Python code that comes with the model to run. Default: it is not run."
    ),
]


def check_dtype(dtype: str) -> str:
    """``dtype``; a ValueError where it is none of ``DTYPES``."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: found {dtype!r}, expected one of {list(DTYPES)}")
    return dtype

"""The model that commands load: options that say which version of it, and in which dtype."""

from dataclasses import dataclass
from typing import Annotated

import typer

DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Loading:
    """Options of every command that loads a model; a ValueError where the dtype is none of ``DTYPES``."""

    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of what is not quantized: float32, float16 or bfloat16. auto takes that of the checkpoint."
        ),
    ] = "auto"
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the model on the Hub. Default: its main branch.")
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Allow Python code that comes with the model to run. Default: it is not run."
        ),
    ] = False

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype: found {self.dtype!r}, expected one of {list(DTYPES)}")

    @property
    def source(self) -> dict[str, str | bool | None]:
        """Arguments of every ``from_pretrained``, those of tokenizers and configs too."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

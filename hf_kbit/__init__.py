"""Low-bit weights for Transformers: quantize to 2, 3, 4 or 5 bits while loading, run, fine-tune, save, share.

Importing the package registers the quantization method ``"kbit"`` with Transformers.
"""

from hf_kbit import codebooks
from hf_kbit.config import KbitConfig
from hf_kbit.integrations import transformers as _transformers  # noqa: F401  registers the quantizer
from hf_kbit.linear import KbitLinear
from hf_kbit.ops import dequantize, gemm, quantize, repack

__version__ = "0.1.0.dev0"
__all__ = ["KbitConfig", "KbitLinear", "codebooks", "dequantize", "gemm", "quantize", "repack"]

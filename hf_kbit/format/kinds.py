"""The kinds of weights: a new one is named here, and has its tensor in ``hf_kbit/weight``."""

from hf_kbit.format.decoding import Decoding, ScalarDecoding
from hf_kbit.format.trellis import TrellisDecoding

KINDS: tuple[type[Decoding], ...] = ScalarDecoding, TrellisDecoding
# What files call the tensors of packed weights, of whatever kind.
NAMES = tuple(name for kind in KINDS for name in kind.names)

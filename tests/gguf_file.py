"""A small model as llama.cpp has it."""

from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel


def write_gguf(file: Path) -> None:
    """A Llama of one layer with a byte-level BPE, in Q8_0."""
    import gguf
    import numpy as np

    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    writer, random = gguf.GGUFWriter(file, "llama"), np.random.default_rng(0)
    numbers = {"block_count": 1, "context_length": 4096, "embedding_length": 64, "feed_forward_length": 96}
    numbers |= {"head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4}
    numbers |= {"vocab_size": 258, "bos_token_id": 0, "eos_token_id": 0, "file_type": gguf.LlamaFileType.MOSTLY_Q8_0}
    numbers |= {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_types": [1] * 258}
    numbers |= {"token_list": [*sorted(ByteLevel.alphabet()), "xx", "zz"]}
    numbers |= {"token_merges": ["x x", "z z"]}  # Transformers 5.17 takes a list of one for a string
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)
    matrices = {"token_embd": (258, 64), **{f"blk.0.{name}": shape for name, shape in shapes.items()}}
    for name, shape in matrices.items():
        weight = gguf.quantize(random.standard_normal(shape, dtype=np.float32) / 8, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", weight, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""What an installed wheel must do beside any Python and torch: quantize, run, save, load, and run again."""

import platform
import tempfile

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_kbit
from hf_kbit.ops import native

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
dense = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
ids = torch.arange(8)[None]
with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
    dense.save_pretrained(f"{folder}/dense")
    config = hf_kbit.KbitConfig(bits=4)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/dense", quantization_config=config)
    assert isinstance(model.model.layers[0].mlp.up_proj, hf_kbit.KbitLinear)
    model.save_pretrained(f"{folder}/packed")
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/packed")
    assert again(ids).logits.equal(model(ids).logits)
    tokens = again.generate(ids, max_new_tokens=8, do_sample=False)
assert tokens.shape == (1, 16)

# Compiled code must be there: plain PyTorch, which gives the same, is no release. CUDA's needs a torch with CUDA.
expected = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
for name in expected:
    assert native.library(name).loaded, native.library(name).missing
print(
    f"Python {platform.python_version()}, torch {torch.__version__}, {' '.join(platform.libc_ver())}: "
    f"passed, with code for {' and '.join(expected)}"
)

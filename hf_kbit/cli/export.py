"""``hf-kbit export``: a quantized model in the form of another program."""

from argparse import ArgumentParser, Namespace


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("form", choices=["exl3"], help="exl3: what exllamav3 runs.")
    parser.add_argument("folder", help="Folder of a model that was quantized with a trellis.")
    parser.add_argument("out", help="New folder.")


def command(given: Namespace) -> None:
    """Write a model whose layers have a trellis as a folder of EXL3."""
    from hf_kbit.integrations.transformers.exl3_export import export_exl3

    export_exl3(given.folder, given.out)

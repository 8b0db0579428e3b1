"""What errors say of what they have found."""

MAX_NAMED = 20  # problems spelled out in one error
MOST_SHOWN = 500  # characters of what a file says


def shown(found: object) -> str:
    """What an error says of something that may be long, for it comes out of a file."""
    text = repr(found)
    return text if len(text) <= 100 else f"{text[:100]}..."


def refuse(problems: list[str], what: str = "the quantized checkpoint does not fit the model") -> None:
    """Raises a ValueError that lists the problems, if there are any."""
    if problems:
        more = [f"... and {len(problems) - MAX_NAMED} more"] if len(problems) > MAX_NAMED else []
        lines = "\n  ".join([*map(brief, problems[:MAX_NAMED]), *more])
        raise ValueError(f"{what}:\n  {lines}")


def brief(text: str) -> str:
    """The beginning of a text that may be of any length, for it stood in a file."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"

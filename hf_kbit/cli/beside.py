"""What lies beside the weights of a model: ``hf-kbit quantize`` copies it, and says what it leaves behind."""

import json
import re
import shutil
from pathlib import Path

from hf_kbit.cli.output import line

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".h5", ".msgpack", ".ot", ".tflite")
WEIGHTS += (".gguf", ".ggml", ".onnx", ".onnx_data", ".pb", ".mlmodel", ".index.json")
ADAPTERS = "adapter_config.json"  # with which Transformers would look for adapters in a folder
MODULES, INDEX = "modules.json", "model.safetensors.index.json"
READ = re.compile(r"(pytorch_)?model\b.*")  # to quantize the model, if no index says it


def copy(model: str, revision: str | None, out: Path) -> None:
    """Copies what is neither a weight nor in the folder ``out`` already: tokenizers, processors, templates, and what
    other libraries need, in folders too; of sentence-transformers' modules their weights as well. Says what stays
    behind: other weights that were not read, and folders with such."""
    here = Path(model).is_dir()
    names = _names(Path(model)) if here else _on_the_hub(model, revision)

    def folder_with(files: list[str]) -> Path:
        if here:
            return Path(model)
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, allow_patterns=files))

    modules = tuple(_modules(folder_with([MODULES]) / MODULES)) if MODULES in names else ()
    index = json.loads((folder_with([INDEX]) / INDEX).read_text(encoding="utf-8")) if INDEX in names else {}
    read = {name for name in names if READ.fullmatch(name)} | {*index.get("weight_map", {}).values()}
    weights = {name for name in names if name.endswith(WEIGHTS) or name == ADAPTERS}
    weights = {name for name in weights if not name.startswith(modules)}
    apart = {f"{top}/" for top, inside, _ in (name.partition("/") for name in weights) if inside}
    kept = [
        name
        for name in names
        if name.startswith(modules) or (name not in weights and not name.startswith(tuple(apart)))
    ]
    folder = folder_with(kept)
    for name in kept:
        target = out / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, target)
    if not any(Path(name).name.startswith("tokenizer") or "processor" in name for name in kept):
        line("tokenizer", f"none in {model}")
    if left := sorted(apart | {name for name in weights - read if "/" not in name}):
        line("left behind", f"{', '.join(left)}: with weights that were not read, so in {model} alone")


def _modules(file: Path) -> list[str]:
    """The folders, each with a slash behind it, of what sentence-transformers puts behind a model."""
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # some other file of that name
        return []
    paths = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return [f"{path.rstrip('/')}/" for path in paths if path and isinstance(path, str)]


def _names(folder: Path) -> list[str]:
    """Of the files in a folder, but hidden ones, as all are of a model that is being made in it."""
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [name.as_posix() for name in names if not any(part.startswith((".", "__")) for part in name.parts)]


def _on_the_hub(model: str, revision: str | None) -> list[str]:
    from huggingface_hub import list_repo_files, snapshot_download

    try:
        names = list_repo_files(model, revision=revision)
    except Exception:  # without a connection, which fails in many ways: what is in the cache
        return _names(Path(snapshot_download(model, revision=revision, local_files_only=True)))
    return [name for name in names if not name.startswith(".")]

"""The files that a model's weights are loaded from, found without reading them."""

from __future__ import annotations

from pathlib import Path

from sglang.srt.model_loader.weight_utils import (
    filter_duplicate_safetensors_files,
    filter_files_not_needed_for_inference,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

# Load format -> endings in the order in which SGLang looks for them; other formats have their own
# loaders (DefaultModelLoader._prepare_weights in SGLang's model_loader/loader.py).
_ENDINGS = {
    "auto": (".safetensors", ".bin", ".pt"),
    **dict.fromkeys(("safetensors", "fastsafetensors", "instanttensor"), (".safetensors", ".pt")),
    "pt": (".pt",),
    "npcache": (".bin", ".pt"),
}


def weight_bytes(folder: Path, load_format: str) -> int | None:
    """Size of the files that SGLang loads a model's weights from; None if it cannot be told from a
    folder and this format.

    Raises ValueError if the folder has no such files, or lacks one that their index lists.
    """
    endings = _ENDINGS.get(load_format)
    if endings is None or not folder.is_dir():
        return None
    found = (sorted(map(str, folder.glob(f"*{ending}"))) for ending in endings)
    files = filter_files_not_needed_for_inference(next(filter(None, found), []))
    if not files:
        wanted = " or ".join(f"*{ending}" for ending in endings)
        raise ValueError(f"{folder} has no weights ({wanted}): download them")
    index = WEIGHTS_INDEX_NAME if files[0].endswith(".bin") else SAFE_WEIGHTS_INDEX_NAME
    try:
        files = filter_duplicate_safetensors_files(files, str(folder), index)
        return sum(Path(file).stat().st_size for file in files)
    except (RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} lacks weights, {type(error).__name__}: {error}: download them again"
        ) from error

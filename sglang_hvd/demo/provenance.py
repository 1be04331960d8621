"""What a checkpoint file of the demo says about its making, in the metadata of the safetensors."""

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from safetensors import safe_open

from sglang_hvd.demo.corpus.session import FAMILIES
from sglang_hvd.demo.corpus.sessions import train_sessions
from sglang_hvd.demo.training.recipes import SEEDS, Recipe

# What decides the weights, in addition to the corpus and the recipe.
_TRAINING_CODE = (
    *("dataset.py", "demo_tokenizer.py", "target.py", "induction.py"),
    *("distillation.py", "eagle3.py", "gradients.py"),
)
_LENGTH_BYTES = 8  # of the header, at the beginning of a safetensors file


def provenance_of(recipe: Recipe) -> dict[str, object]:
    """The recipe, the digests and the versions with which a build begins now."""
    packages = ("sglang-hvd", "torch", "transformers", "tokenizers")
    return {
        "made_by": "sglang-hvd demo --rebuild",
        "licence": "Apache-2.0",
        "recipe": asdict(recipe),
        "seeds": dict(SEEDS),
        "corpus_digest": corpus_digest(),
        "training_digest": training_digest(),
        "versions": {name: version(name) for name in packages},
    }


def corpus_digest() -> str:
    """Changes with the texts that the corpus draws, not with how its code is written."""
    digest = hashlib.sha256()
    for family in FAMILIES:
        for session in train_sessions(family, count=200, seed=0):
            digest.update(repr(session).encode())
    return digest.hexdigest()[:16]


def training_digest() -> str:
    """Changes with the code that trains, but not with its comments, docstrings and imports."""
    digest = hashlib.sha256()
    for name in _TRAINING_CODE:
        tree = ast.parse((Path(__file__).parent / "training" / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                node.body = [child for child in node.body if not _says_nothing(child)]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:16]


def _says_nothing(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom)


def metadata_of(provenance: Mapping[str, object]) -> dict[str, str]:
    """The metadata of a checkpoint that transformers and SGLang load."""
    return {"format": "pt", "provenance": json.dumps(provenance)}


def read_provenance(file: Path) -> dict[str, object]:
    """What the file says about its making. All files of a build have it, the predictor's too."""
    with safe_open(file, framework="numpy") as opened:
        return dict(json.loads(opened.metadata()["provenance"]))


def sort_metadata(file: Path) -> None:
    """Writes the metadata in alphabetic order, so that equal builds give equal bytes.

    safetensors writes it in another order each time.
    """
    content = file.read_bytes()
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = json.loads(content[_LENGTH_BYTES:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    file.write_bytes(content[:_LENGTH_BYTES] + text.ljust(end - _LENGTH_BYTES) + content[end:])

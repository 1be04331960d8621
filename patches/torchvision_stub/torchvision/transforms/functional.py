"""Imported by sglang/srt/multimodal/internvl_utils.py and transformers/image_utils.py."""

from enum import Enum

from torchvision._missing import image_function as pil_to_tensor


class InterpolationMode(Enum):
    """transformers builds tables of these when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__all__ = ["InterpolationMode", "pil_to_tensor"]

"""Imported by sglang/srt/multimodal/internvl_utils.py and transformers/image_utils.py."""

from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode"]

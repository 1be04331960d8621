"""Imported by transformers/image_utils.py."""

from torchvision._missing import image_function as decode_image


class ImageReadMode: ...


__all__ = ["ImageReadMode", "decode_image"]

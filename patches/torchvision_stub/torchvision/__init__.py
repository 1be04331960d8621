"""A stand-in for torchvision: the names that SGLang and transformers import to serve text.

Both import torchvision's image functions at start-up, whatever the model. The real wheel does not
load with torch's CPU build. Calling one of these functions raises NotImplementedError.
"""

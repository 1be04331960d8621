"""The SGLang plugin: the only package that imports sglang.

Made for SGLang 0.5.23. `entry.register` is the entry point that SGLang calls in every process.
"""

"""SGLang decides at import that it runs on a CPU, so this comes before any test imports it."""

import os

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

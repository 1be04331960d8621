"""SGLang 0.5.23 on a CPU without AMX: the plugin that goes with the operators in `sgl_kernel`."""

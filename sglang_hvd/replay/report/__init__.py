"""The report of `sglang-hvd analyze`: figures of recorded generations, as JSON and as a page."""

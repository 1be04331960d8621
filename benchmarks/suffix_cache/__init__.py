"""The native suffix cache compared with ArcticInference: time, memory and drafts."""

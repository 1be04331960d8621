"""The native suffix cache beside ArcticInference: time, memory and drafts."""

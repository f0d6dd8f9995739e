"""lowbit: quantize, pack, prove and write low-bit checkpoints of language models."""

__version__ = "0.1.0"

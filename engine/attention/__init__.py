"""Attention over a sequence in two pieces: a context that is shared and immutable, and a thread that grows.

transformers calls `attend` in every layer; what to attend travels beside the hidden states as a keyword argument, so
that nothing is kept in modules and any number of runners can share a process.
"""

from engine.attention.base import IMPLEMENTATION_NAME, AttentionKernel, KvView, QueryTap, Step
from engine.attention.choose import choose_kernel

__all__ = ["IMPLEMENTATION_NAME", "AttentionKernel", "KvView", "QueryTap", "Step", "choose_kernel"]

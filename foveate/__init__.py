"""Foveate: fast question answering over videos with a sparse drafter, a dense verifier and a gateway."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("foveate")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0"

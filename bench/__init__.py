"""Benchmarks and the test world of Foveate."""

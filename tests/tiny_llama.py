"""The tiny random model of the benchmarks, under the name that tests know it by."""

from flows.bench.random_llama import make_random_llama as make_tiny_llama

__all__ = ["make_tiny_llama"]

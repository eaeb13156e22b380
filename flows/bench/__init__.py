"""Benchmarks behind `blend bench`: each a function that returns the figures it prints."""

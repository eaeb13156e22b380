"""Admission policies: which request starts next, and when."""

"""Workloads from published traces, and the studies that compare policies on them in simulation."""

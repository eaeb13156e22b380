"""Requests before anything runs: every fault of their lines, and what a plan of them promises."""

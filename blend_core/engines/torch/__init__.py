"""The torch engine: paged KV with prefix reuse, chunked prefill, mixed steps, on any torch device.

Importing this package loads no torch; `options` is free of it, `engine` is not.
"""

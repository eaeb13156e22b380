"""The parts of the simulator: prompts as blocks, the KV cache, and the loop over steps."""

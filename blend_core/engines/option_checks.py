"""Checks that the options of every engine have in common."""

from collections.abc import Sequence
from typing import Protocol

from blend_core.errors import ConfigurationError


class StepOptions(Protocol):
    """What an engine's options say of its steps."""

    @property
    def max_num_seqs(self) -> int:
        """Requests in flight at most."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of one step at most."""

    @property
    def request_timeout_s(self) -> float | None:
        """Seconds that a request may take; None: any."""


def check_step_options(options: StepOptions, positive: Sequence[str]) -> None:
    """Checks what a step may hold, and that each option named in `positive` is None or at least 1.

    Raises:
        ConfigurationError: an option makes no sense; the message names it.
    """
    for name in positive:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is {value}; it must be at least 1.")
    if options.request_timeout_s is not None and not options.request_timeout_s > 0:
        raise ConfigurationError(f"request_timeout_s is {options.request_timeout_s}; it must be above 0.")
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise ConfigurationError(
            f"max_num_batched_tokens ({options.max_num_batched_tokens}) is smaller than max_num_seqs "
            f"({options.max_num_seqs}); every decoding request needs a token of each step, so raise it."
        )

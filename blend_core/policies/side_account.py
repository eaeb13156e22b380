"""One side of the dual scan: its share of KV and its token credit."""

from collections import deque
from math import isinf

from blend_core.policies.base import FOR_EVER


def memory_split(num_blocks: float, rho_left: float, rho_right: float, rho: float) -> tuple[float, float]:
    """Shares KV so that both sides together have the root's density (BlendServe §5.3).

    `M_L + M_R = M` and `M_L rho_L + M_R rho_R = M rho`, clamped to [0, M]; equal densities split evenly.

    Args:
        num_blocks: memory to share, in any unit.
        rho_left: compute density at the left cursor; may be infinite.
        rho_right: compute density at the right cursor; may be infinite.
        rho: compute density of the root; may be infinite.

    Returns:
        `(M_L, M_R)` in the unit of `num_blocks`.
    """
    if rho_left == rho_right:
        return num_blocks / 2, num_blocks / 2
    if isinf(rho):
        # Nothing worth naming reads KV, so the denser side may have it all.
        left = num_blocks if rho_left > rho_right else 0.0
    elif isinf(rho_left):
        left = 0.0
    elif isinf(rho_right):
        left = num_blocks
    else:
        left = num_blocks * (rho - rho_right) / (rho_left - rho_right)
    left = min(max(left, 0.0), num_blocks)
    return left, num_blocks - left


class SideAccount:
    """One side's share of KV and its right to start prompt tokens.

    Credit is reckoned from its last change, so that a jump over steps gives exactly what single steps give.

    Attributes:
        capacity_tokens: the side's share of KV, `M_x`.
        credit_tokens_per_step: prompt tokens that a step adds to the credit, `C_x`.
        head: slot to start next, None where the side has none.
        leads: waiting slots that come before the cursor; the first one waits.
        resident_tokens: sum of `p + d / 2` of the side's requests in flight.
    """

    __slots__ = (
        "_credit_tokens",
        "_since",
        "capacity_tokens",
        "credit_tokens_per_step",
        "head",
        "leads",
        "resident_tokens",
    )

    def __init__(self) -> None:
        self.head: int | None = None
        self.leads: deque[int] = deque()
        self.capacity_tokens = 0.0
        self.resident_tokens = 0.0
        self.credit_tokens_per_step = 0.0
        self._credit_tokens = 0.0
        self._since = 0

    def credit_tokens(self, clock: int) -> float:
        """Prompt tokens that the side may start; below zero it has started more than it may."""
        rate = self.credit_tokens_per_step
        saved_tokens = self._credit_tokens + rate * (clock - self._since)
        return saved_tokens if saved_tokens < rate else rate

    def charge(self, clock: int, num_tokens: float) -> None:
        """Takes tokens off the credit."""
        self._credit_tokens = self.credit_tokens(clock) - num_tokens
        self._since = clock

    def set_rate(self, clock: int, credit_tokens_per_step: float) -> None:
        """Changes what a step gives; what was saved stays, up to one step of the new rate."""
        self.charge(clock, 0.0)
        self.credit_tokens_per_step = credit_tokens_per_step

    def quiet_steps(self, clock: int) -> int:
        """Steps until a credit of zero or less is above zero again."""
        rate = self.credit_tokens_per_step
        num_steps = int(-self.credit_tokens(clock) / rate) + 1 if rate > 0 else FOR_EVER
        # The division rounds; the gate looks at the sum.
        return num_steps - 1 if self.credit_tokens(clock + num_steps - 1) > 0 else num_steps

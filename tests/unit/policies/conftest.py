"""Plans of a few numbers and a view that a test sets by hand."""

from dataclasses import dataclass, field

import pytest
from hand_plan import plan_of


@dataclass
class HandView:
    """An `EngineView` that is what the test says."""

    num_free_blocks: int = 1_000_000
    num_running: int = 0
    num_decoding: int = 0
    held: dict = field(default_factory=dict)
    absent: set = field(default_factory=set)

    def num_held_blocks(self, seq):
        return self.held.get(seq, 0)

    def is_ready(self, seq):
        return seq not in self.absent


@pytest.fixture
def make_plan():
    return plan_of


@pytest.fixture
def view():
    return HandView()

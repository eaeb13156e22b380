"""Planning anew in the middle of a simulated run, from the lengths that the run has shown so far."""

from typing import Final

import numpy as np

from blend_core.plan import Plan
from blend_core.planner import PlanConfig, build_plan
from blend_core.simulation.prompts import Prompts
from blend_core.specs import DeviceProfile, ModelSpec

STRAGGLER_SHARE: Final = 0.1
"""The longest samples end last: the revision waits for all but this share of them."""

ENDED_SHARE_BEFORE_LEAVING_STRAGGLERS: Final = 0.25
"""And it waits for all of them until this share of the plan has ended, since their lengths are telling."""


class SampleReplanner:
    """Plans revision 1 once the lead requests of the first plan have ended; a `RunFeedback`.

    It knows the output length of a request only after the request has ended in the run.
    """

    __slots__ = (
        "_config",
        "_device",
        "_is_done",
        "_is_open",
        "_model",
        "_num_ended",
        "_open_lead",
        "_plan",
        "_requests",
        "_row_of",
        "_samples",
    )

    def __init__(
        self, requests: Prompts, plan: Plan, model: ModelSpec, device: DeviceProfile, config: PlanConfig
    ) -> None:
        """Takes what the first plan was made of."""
        self._requests = requests
        self._plan = plan
        self._model = model
        self._device = device
        self._config = config
        self._row_of = {seq: row for row, seq in enumerate(requests.seq.tolist())}
        self._is_open = np.ones(len(requests), dtype=np.bool_)
        self._open_lead = set(plan.seq[plan.lead].tolist())
        self._samples: dict[int, int] = {}
        self._num_ended = 0
        self._is_done = not self._open_lead

    def ended(self, seq: int, num_output_tokens: int) -> None:
        """A request of the plan ended. One without an answer is no sample: it tells no length."""
        if self._is_done:
            return
        self._num_ended += 1
        self._is_open[self._row_of[seq]] = False
        if seq in self._open_lead:
            self._open_lead.remove(seq)
            if num_output_tokens > 0:
                self._samples[seq] = num_output_tokens

    def revision(self) -> Plan | None:
        """Revision 1, once, as soon as enough samples are in; none where no lead request has an answer."""
        if self._is_done or not self._is_due():
            return None
        self._is_done = True
        rows = np.flatnonzero(self._is_open)
        if len(rows) == 0 or not self._samples:
            return None
        sampled = np.array([self._row_of[seq] for seq in self._samples], dtype=np.int64)
        rows = np.union1d(rows, sampled)
        return build_plan(
            self._requests.take(rows),
            self._model,
            self._device,
            self._config,
            self._samples,
            self._plan.revision + 1,
        )

    def _is_due(self) -> bool:
        if not self._open_lead:
            return True
        num_open = len(self._open_lead)
        are_stragglers = num_open <= STRAGGLER_SHARE * (num_open + len(self._samples))
        return are_stragglers and self._num_ended >= ENDED_SHARE_BEFORE_LEAVING_STRAGGLERS * len(self._plan)

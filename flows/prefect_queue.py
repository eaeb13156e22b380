"""Jobs that were handed to Prefect and wait for their turn: nothing runs them yet, and something will."""

from itertools import count
from typing import Final

import httpx

AD_HOC: Final = "ad-hoc"
"""The deployment that runs submitted jobs."""

_PAGE: Final = 200


def queued_jobs(prefect_api_url: str | None) -> frozenset[str] | None:
    """Ids of the jobs that flow runs of the deployment `ad-hoc` wait to run, or run.

    Returns:
        None where Prefect does not answer. Without a Prefect nothing is queued.
    """
    if prefect_api_url is None:
        return frozenset()
    # Only here: it takes seconds to load, and is asked for jobs that no run has begun alone.
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterName,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.settings import PREFECT_API_URL, temporary_settings

    goes_on = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
    found: set[str] = set()
    try:
        with temporary_settings({PREFECT_API_URL: prefect_api_url}), get_client(sync_client=True) as client:
            for offset in count(0, _PAGE):
                page = client.read_flow_runs(
                    deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[AD_HOC])),
                    flow_run_filter=FlowRunFilter(
                        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=goes_on))
                    ),
                    limit=_PAGE,
                    offset=offset,
                )
                found |= {str(run.parameters.get("job_id")) for run in page}
                if len(page) < _PAGE:
                    break
    except httpx.HTTPError:
        return None
    return frozenset(found)

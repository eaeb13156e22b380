"""Simulations of the studies, spread over processes: one task per workload and seed."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from blend_core.errors import PlanError
from blend_core.specs import DeviceProfile, ModelSpec, load_device_profile, model_spec_preset
from blend_core.studies.mixes import Setting
from blend_core.studies.study import BLOCK_SIZE, PolicyRun, WorkloadRun, mean_over_seeds
from blend_core.studies.workload import Workload

MODEL: Final = "llama-3.1-8b"
DEVICE: Final = "a100-80g"
"""What BlendServe's figures are of (§6.1)."""

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class StudyRun:
    """A study that has run.

    Attributes:
        data: `real` where lengths come from published traces, else `generated`.
        hours: practical optimum of each workload.
        seeds: seeds that every figure is the mean of.
        workloads: means over them.
    """

    data: str
    hours: float
    seeds: tuple[int, ...]
    workloads: tuple[WorkloadRun, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {
            "data": self.data,
            "seeds": list(self.seeds),
            "workloads": [workload_json(run) for run in self.workloads],
        }


def workload_json(run: WorkloadRun) -> dict[str, Any]:
    """Returns the object of one workload."""
    return {
        "name": run.name,
        "set": run.length_set,
        "density": run.density,
        "prefix_sharing": run.prefix_sharing,
        "num_requests": _whole(run.num_requests),
        "optimum_s": run.optimum_s,
        "policies": {name: _policy_json(policy) for name, policy in run.policies.items()},
    }


@dataclass(frozen=True, slots=True)
class StudyTarget:
    """What a study simulates.

    Attributes:
        model: the model.
        device: abilities of all devices of a replica together.
    """

    model: ModelSpec
    device: DeviceProfile

    def setting(self, hours: float) -> Setting:
        """Returns what workloads of a length are made for."""
        return Setting(self.model, self.device, BLOCK_SIZE, hours)


def study_target() -> StudyTarget:
    """Returns what the published figures are of, and ours where nothing else is asked for."""
    return StudyTarget(model_spec_preset(MODEL), load_device_profile(DEVICE))


def run_tasks(
    run: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    tell: Callable[[str], None],
    name_of: Callable[[_Task], str],
) -> list[_Result]:
    """Runs tasks over all cores, each in a fresh interpreter; returns results in the order of the tasks.

    Args:
        run: a function of a module, since it goes to other processes.
        tasks: what it is called with.
        tell: hears of each task that is done.
        name_of: names a task in what is told.

    Raises:
        PlanError: a process was ended from outside.

    What a task raises is raised, and those that have not begun never do.
    """
    results: dict[int, _Result] = {}

    def add(place: int, result: _Result) -> None:
        results[place] = result
        tell(f"{len(results)} of {len(tasks)}: {name_of(tasks[place])}")

    num_workers = min(len(tasks), os.cpu_count() or 1)
    if num_workers <= 1:
        for place, task in enumerate(tasks):
            add(place, run(task))
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
            places = {pool.submit(run, task): place for place, task in enumerate(tasks)}
            try:
                for done in as_completed(places):
                    add(places[done], done.result())
            except BrokenProcessPool:
                raise PlanError(
                    "A process of the study was ended from outside, most likely for want of memory; "
                    "ask for smaller workloads."
                ) from None
            except BaseException:
                # What has not begun would be waited for, and thrown away.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [results[place] for place in range(len(tasks))]


def over_seeds(runs: Sequence[WorkloadRun]) -> tuple[WorkloadRun, ...]:
    """Returns the mean of each workload and set, in order of first appearance."""
    groups: dict[tuple[str, str], list[WorkloadRun]] = {}
    for run in runs:
        groups.setdefault((run.name, run.length_set), []).append(run)
    return tuple(mean_over_seeds(group) for group in groups.values())


def interleaved(workload: Workload, seed: int) -> Workload:
    """Returns the workload with its segments renamed at random, so that depth-first order mixes the kinds.

    It is the order of prompts that have nothing in common with others of their kind.
    """
    requests = workload.requests
    names, places = np.unique(requests.segment_ids, return_inverse=True)
    renamed = np.random.default_rng(seed).permutation(len(names)).astype(np.int64)
    return replace(workload, requests=replace(requests, segment_ids=renamed[places]))


def _policy_json(run: PolicyRun) -> dict[str, Any]:
    return {
        "duration_s": run.duration_s,
        "fraction_of_optimum": run.fraction_of_optimum,
        "sharing_kept": run.sharing_kept,
        "num_steps": _whole(run.num_steps),
        "num_preempted": _whole(run.num_preempted),
        "compute_s": run.compute_s,
        "memory_s": run.memory_s,
    }


def _whole(value: float) -> float | int:
    """A whole number as one: means over seeds may not be."""
    return int(value) if float(value).is_integer() else value

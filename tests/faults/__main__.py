"""Kills every component of the stack at random moments while jobs run, and checks that nothing is lost.

    make test-faults
    PYTHONPATH=tests python -m faults --seed 7 --kills 50

The last line of its output is one JSON object: kills, by_component, lost, duplicated, orphans (engine
processes that outlived their flow run), unended (jobs without an end state or their output), sum_holds, seed.
The exit status is 0 only when all kills landed, every job ended with its output, and nothing was lost,
duplicated, left over or counted wrongly.
"""

import argparse
import json
import random
import secrets
import signal
import sys
import time

from faults.checks import check
from faults.jobs import Watch, make_model, make_table, submit
from faults.kills import Executioner, Kill, StageTimes, in_order_of_time, plan_kill, plan_kills
from faults.outcome import Outcome, kill_table, stage_table
from faults.stack import stack_under_test

KILLS_PER_JOB = 16
MAX_JOBS_PER_KILL = 2


def main() -> int:
    """Runs the whole and returns the exit status."""
    arguments = _arguments()
    started_s = time.monotonic()
    # So that the services are stopped then, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - started_s:6.1f} s] {line}", flush=True)

    tell(f"seed {arguments.seed}")
    rng = random.Random(arguments.seed)
    outcome = Outcome()
    with stack_under_test(tell) as stack:
        make_table(stack.wiring)
        model = make_model(stack.home / "tiny-llama")
        tell("the stack is up")
        waiting = plan_kills(arguments.kills, rng)
        watch, times = Watch(stack.wiring), StageTimes()
        number = 0
        while waiting and number < MAX_JOBS_PER_KILL * arguments.kills and outcome.is_clean:
            number += 1
            batch, waiting = in_order_of_time(waiting[:KILLS_PER_JOB]), waiting[KILLS_PER_JOB:]
            job = submit(
                stack.wiring,
                model,
                rng,
                number=number,
                num_lines=arguments.requests,
                num_ranks=arguments.ranks,
            )
            tell(f"job {number}: {job.job_id}, {len(job.items)} lines and rows")
            executioner = Executioner(stack, watch, job, times)
            for planned in batch:
                kill = executioner.carry_out(planned)
                if kill is None:
                    waiting.append(plan_kill(planned.component, rng))
                    continue
                outcome.kills.append(kill)
                tell(_kill_line(kill, len(outcome.kills), arguments.kills))
            _end_job(stack, watch, job, executioner, outcome, tell)
    for table in (kill_table(outcome.kills), stage_table(outcome.kills)):
        print(f"\n{table}", flush=True)
    print(f"\n{time.monotonic() - started_s:.0f} s in all", flush=True)
    print(json.dumps(outcome.as_json(arguments.seed)), flush=True)
    return 0 if outcome.is_clean and len(outcome.kills) >= arguments.kills else 1


def _end_job(stack, watch, job, executioner, outcome, tell) -> None:
    if not executioner.finish():
        tell(f"{job.job_id} is stuck: it did not go on for minutes")
    record = watch.record(job, executioner.snapshots, stack.admissions_file)
    findings = check(record)
    outcome.add(findings)
    if not findings.has_ended:
        tell(f"{job.job_id} has not ended with its output")
    for name in (*findings.lost, *findings.duplicated):
        tell(f"{job.job_id}: {name}: {findings.lost.get(name) or findings.duplicated[name]}")
    orphans = stack.orphaned_engines()
    if orphans:
        outcome.num_orphans += len(orphans)
        tell(f"{len(orphans)} engine processes outlived their flow run")
    counters = record.counters
    tell(
        f"{job.job_id} ended: {counters['succeeded']} succeeded + {counters['errored']} errored + "
        f"{counters['expired']} expired + {counters['cancelled']} cancelled = {counters['total']}; "
        f"{len(record.lines)} exported lines; {sum(len(seen.results) for seen in executioner.snapshots)} "
        "results seen at kills are unchanged"
        if findings.is_clean
        else f"{job.job_id} ended with faults"
    )


def _kill_line(kill: Kill, number: int, num_kills: int) -> str:
    far = f"{kill.num_done} of {kill.num_total} requests" if kill.num_total else "no request yet"
    return (
        f"kill {number:2} of {num_kills}: {kill.component:8} in {kill.stage:6} at {far:22} "
        f"went on after {kill.recovery_s:.1f} s"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10_000), help="of every random choice")
    parser.add_argument("--kills", type=int, default=50, help="kills that have to land")
    parser.add_argument("--requests", type=int, default=800, help="request lines of a job")
    parser.add_argument("--ranks", type=int, default=1, help="engines that share a job")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

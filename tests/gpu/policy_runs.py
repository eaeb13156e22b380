"""What the scripts of this folder have in common: policies, options with defaults, what is told of a run."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

POLICIES = ("fcfs", "dfs", "dual_scan", "density_matched")

HOW_TO_READ = """\
Of each run read

  to_fcfs              output_tokens_per_s over that of fcfs in the same round: above 1 our order is faster
                       than the file's own
  prefix_sharing       share of prompt tokens that came from the cache, 0 to 1; more is better
  num_preempted        fewer is better
  num_failed           must be 0
"""


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help keeps the lines of the description and says how to read the figures."""
    return argparse.ArgumentParser(
        description=description, epilog=HOW_TO_READ, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_option(to: argparse.ArgumentParser, name: str, default: float | str, meaning: str) -> None:
    """Adds an option of its default's type, whose help tells the default."""
    to.add_argument(name, type=type(default), default=default, help=f"{meaning} (default: %(default)s)")


def beside_fcfs(run: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run with `to_fcfs`; rounds begin with `fcfs`, so that the last one before it is of its round."""
    base = next((one for one in reversed([*earlier, run]) if one["policy"] == "fcfs"), run)
    speed = base["output_tokens_per_s"]
    return run | {"to_fcfs": run["output_tokens_per_s"] / speed if speed else 0.0}


def tell(run: dict[str, Any], number: int, num_asked: int) -> None:
    """A line on standard error: a script takes minutes."""
    sys.stderr.write(
        f"{number} of {num_asked}: {run['policy']}, {run['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{run['to_fcfs']:.2f}x fcfs, sharing {run['prefix_sharing']:.1%}, {run['num_preempted']} preempted, "
        f"{run['num_failed']} failed\n"
    )
    sys.stderr.flush()

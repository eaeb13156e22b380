"""The command line `blend`: one file per command group.

Services, engines and Prefect are imported inside the commands that need them, so that help answers at once.
"""

from flows.cli.app import main

__all__ = ["main"]

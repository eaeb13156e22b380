"""The command line `blend`: one file per command group.

Services, engines and Prefect are imported inside the commands that need them, so that help answers at once.
"""

import sys
from collections.abc import Sequence

EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command line, by default the process's own, and exits with its status; see `flows.cli.app`.

    Ctrl-C that no command takes, as while the commands are still being imported, ends the process without a
    word and with status 130.
    """
    try:
        from flows.cli.app import run_command

        run_command(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)

"""A stand-in for the platform's deployments: one flow that starts a process of its own and waits."""

import subprocess
import sys
import time

from prefect import flow


@flow
def wait_for_the_end() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)


if __name__ == "__main__":
    wait_for_the_end.serve(name="sample")

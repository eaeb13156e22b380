"""A stack as `blend up` starts it, and a browser in front of Prefect's pages.

The pictures of docs/ui.md are written by

    pytest tests/e2e/ui --pictures docs/images
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blend_core.model_store import ModelStore
from flows.cli.services import connected
from flows.settings import Settings
from flows.wiring import Wiring
from infra.supervisor import LocalStack

sys.path.insert(0, str(Path(__file__).parent))

from pages import PATIENCE_MS, Camera, Stack
from playwright.sync_api import Browser, Page, expect, sync_playwright

RUN_MAIN = "from flows.cli import main; main()"
VARIABLES = {
    "BLEND_ENGINE__DTYPE": "float32",
    "BLEND_ENGINE__KV_GIB": "0.02",
    "BLEND_ENGINE__MAX_NUM_SEQS": "16",
    "BLEND_ENGINE__MAX_NUM_BATCHED_TOKENS": "256",
    "BLEND_ENGINE__NUM_THREADS": "1",
    "BLEND_NIGHTLY__CRON": "30 2 * * *",
    "BLEND_NIGHTLY__TIMEZONE": "Europe/Berlin",
    "PREFECT_RUNNER_POLL_FREQUENCY": "1",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", metavar="FOLDER", help="write the pictures of docs/ui.md there")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Stack]:
    """Postgres, S3, Prefect and the served deployments, by the command; `tiny-llama` is known by name."""
    home = tmp_path_factory.mktemp("ui") / "home"
    job_file = home.with_name("night.yaml")
    job_file.write_text(
        json.dumps({"name": "ticket summaries", "model": "tiny-llama", "s3": ["s3://blend/night/"]})
    )
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("BLEND_", "PREFECT_"))
    }
    environment = inherited | VARIABLES | {"BLEND_HOME": str(home), "BLEND_NIGHTLY__JOB": str(job_file)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN_MAIN, "up", "--json"],
            env=environment,
            cwd=home.parent,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode != 0 and os.environ.get("CI") != "true":
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stderr
        ModelStore(home / "models").add(Path(tiny_model))
        yield Stack(home, json.loads(done.stdout)["prefect_ui_url"])
    finally:
        LocalStack(home).erase(lambda line: None)


@pytest.fixture(scope="module")
def wiring(stack: Stack) -> Iterator[Wiring]:
    """The platform's tables and bucket of that stack."""
    with connected(Settings(home=stack.home)) as parts:
        yield parts


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium of the operating system."""
    executable = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if executable is None:
        message = "Prefect's pages are tested in Chromium; install it (Debian: apt-get install chromium)."
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    # Chromium's sandbox refuses to run as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh browser window, its clock in UTC."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-US", timezone_id="UTC")
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    yield context.new_page()
    context.close()


@pytest.fixture
def camera(request: pytest.FixtureRequest) -> Camera:
    """Takes pictures where `--pictures` names a folder."""
    folder = request.config.getoption("--pictures", default=None)
    return Camera(None if folder is None else Path(folder))

"""Prefect's pages as a person uses them: the form of a deployment, a schedule, a flow run, an artifact."""

import re
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

# Generous, since a busy machine with two cores runs browser, server and engine side by side.
PATIENCE_MS = 60_000
NUM_TRIES = 5


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack: its state folder and the address of Prefect's pages."""

    home: Path
    ui_url: str


class RunForm:
    """The form behind `Run`, made by Prefect from the flow's parameters."""

    def __init__(self, page: Page, ui_url: str, deployment_id: str) -> None:
        self.page = page
        page.goto(f"{ui_url}/deployments/deployment/{deployment_id}/run")
        expect(page.get_by_role("heading", name="Parameters")).to_be_visible()

    def field(self, label: str) -> Locator:
        """The field of that name with its description and its control; the innermost one of that name."""
        own_label = "> .p-label__header .schema-form-property__label"
        name = re.compile(rf"^{re.escape(label)}( \(Optional\))?$")
        fields = self.page.locator(".schema-form-property")
        return fields.filter(has=self.page.locator(own_label, has_text=name)).last

    def control(self, label: str) -> Locator:
        """Where a text or a number is typed."""
        return self.field(label).locator("textarea, input").last

    def add_item(self, label: str) -> None:
        """One more item for a list."""
        items = self.field(label).get_by_role("button", name="Add item")
        items.last.click()

    def choose(self, label: str, option: str) -> list[str]:
        """Takes an option of an enumeration; returns all that there are to choose from."""
        button = self.field(label).locator(".p-select-button__control")
        button.press("ArrowDown")
        options = self.page.locator(".p-select-options .p-select-option")
        expect(options.first).to_be_visible()
        names = options.all_inner_texts()
        options.get_by_text(option, exact=True).click()
        expect(button).to_have_text(option)
        return names

    def show(self, label: str) -> None:
        """Scrolls the field of that name to the upper edge."""
        self.field(label).evaluate("field => field.scrollIntoView()")

    def submit(self) -> None:
        """Presses the button."""
        self.page.get_by_role("button", name="Submit").click()

    def submit_and_get_run(self) -> str:
        """Presses the button and returns the id of the flow run that was made.

        A server whose database is busy answers 503 and its page says so: the button is pressed again then.
        """
        for _ in range(NUM_TRIES):
            with self.page.expect_response(re.compile("create_flow_run$")) as answer:
                self.submit()
            if answer.value.status != 503:
                break
        assert answer.value.ok, answer.value.text()
        return str(answer.value.json()["id"])


class FlowRunPage:
    """A flow run with its tabs. It updates itself every few seconds."""

    def __init__(self, page: Page, ui_url: str, flow_run_id: str) -> None:
        self.page = page
        page.goto(f"{ui_url}/runs/flow-run/{flow_run_id}")

    @property
    def state(self) -> Locator:
        """The badge beside the name."""
        return self.page.locator(".state-badge").first

    def open_tab(self, name: str) -> None:
        """`Logs`, `Task Runs`, `Artifacts`, `Details`, …"""
        # Some tabs come with the start of the run.
        self.page.locator(".p-tab", has_text=name).first.click()

    def artifact(self, key: str) -> Locator:
        """The card of an artifact in the tab `Artifacts`."""
        return self.page.locator(".artifact-card", has_text=key)

    def open_artifact(self, key: str) -> None:
        """Goes from the tab to the artifact's own page."""
        self.artifact(key).click()
        expect(self.page.get_by_text("Show raw data")).to_be_visible()

    def cancel(self) -> None:
        """Presses `Cancel` and confirms."""
        self.page.get_by_role("button", name="Cancel").click()
        self.page.get_by_role("dialog").get_by_role("button", name="Confirm").click()


class Camera:
    """Takes the pictures of docs/ui.md where the suite was asked for them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def take(self, page: Page, name: str, height_px: int = 900) -> None:
        """Writes `ui-NAME.png` of the page from its current place of scrolling."""
        if self._folder is None:
            return
        size = page.viewport_size
        assert size is not None
        page.set_viewport_size({"width": size["width"], "height": height_px})
        page.screenshot(path=self._folder / f"ui-{name}.png", animations="disabled")
        page.set_viewport_size(size)

import browser as chrome
import pytest


@pytest.fixture(scope="session")
def browser():
    """The machine's Chromium; where it has none, what needs it is skipped, with a word."""
    if chrome.find_browser() is None:
        pytest.skip(chrome.NO_BROWSER)
    with chrome.chromium() as started:
        yield started

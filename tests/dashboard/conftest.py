"""One browser for all tests of pages."""

import pytest
from tests.dashboard.chromium import start_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser") / "profile"
    folder.mkdir()
    with start_browser(folder) as browser:
        yield browser

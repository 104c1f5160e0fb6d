"""The devices of a deployment in a real Chromium: live, in both themes, on a phone."""

import pytest
from tests.dashboard.chromium import find_browser, serve
from tests.dashboard.written_runs import make_lines, make_writer, write_run

from pliant.deploy.server.presence import Battery

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(find_browser() is None, reason="install Chromium to test the pages"),
]
TEXT = "document.querySelector('#fleet-text').textContent"
DASH = "\N{EN DASH}"
ROWS = "[...document.querySelectorAll('#fleet-devices tbody tr')]"


def test_devices_are_shown_live_in_both_themes_and_on_a_phone(browser, tmp_path):
    run = write_run(tmp_path / "runs" / "live", 2, rounds=9, fleet={"size": 3})
    make_writer(run).note_online({0, 1, 2})
    make_writer(run).note_reply(1, Battery(0.63, is_charging=True))
    with serve(tmp_path / "runs") as address:
        page = browser.open(address)
        page.until(f"{TEXT}.startsWith('3 of 3 devices online, 2 of 9 rounds closed')")
        cells = page.run(f"{ROWS}.map(row => [...row.cells].map(cell => cell.textContent))")
        assert cells[1][:2] == ["1", "online"]
        assert cells[1][3:] == [
            "63 %, charging", "500", f"10{DASH}100 %", "2", "0", "0", "finished",
        ]  # fmt: skip
        assert cells[2][3:6] == [DASH] * 3  # it has not trained yet
        page.save_screenshot(tmp_path / "light.png", is_full_page=True)
        make_writer(run).note_online({0, 2})
        page.until(f"{TEXT}.startsWith('2 of 3 devices online')")
        page.until(f"{ROWS}[1].classList.contains('offline')")
        page.run(
            "(() => { const s = document.querySelector('#fleet-sort'); "
            "s.value = 'problems'; s.onchange() })()"
        )
        assert page.run(f"{ROWS}[0].cells[0].textContent") == "1"
        lines = make_lines(2).replace(b'"digest":null', b'"digest":"0f"')
        with open(run / "events.jsonl", "ab") as file:
            file.write(lines)
        page.until(f"{TEXT}.includes('the run is finished')")
        page.set_scheme("dark")
        page.resize(390, 844, is_phone=True)
        page.until("document.querySelector('#fleet').getBoundingClientRect().width < 390")
        assert page.run("document.documentElement.scrollWidth") <= 390
        boxes = page.run(
            f"{ROWS}.flatMap(row => [...row.cells].map(cell => cell.getBoundingClientRect()))"
            ".map(box => [box.left, box.right, box.height])"
        )
        assert all(0 <= left < right <= 390 and height > 0 for left, right, height in boxes)
        page.run("document.querySelector('#fleet').scrollIntoView()")
        page.save_screenshot(tmp_path / "phone.png")
        assert page.get_errors() == []
        page.close()


def test_a_simulated_run_shows_no_deployment(browser, tmp_path):
    write_run(tmp_path / "runs" / "simulated", 2)
    with serve(tmp_path / "runs") as address:
        page = browser.open(address)
        page.until("document.querySelectorAll('#chart .curve').length === 1")
        assert page.run("document.querySelector('#fleet').hidden")
        page.close()

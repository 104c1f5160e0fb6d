"""The server: authentication, responses, and resumption of the event stream."""

import asyncio
import json

import httpx
import pytest
from tests.dashboard.written_runs import make_lines, write_run

from pliant.dashboard import server

TOKEN = "a-token-of-some-length"


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "runs" / "one", 3)
    write_run(tmp_path / "runs" / "two", 4)
    write_run(tmp_path / "secret", 4)
    return tmp_path / "runs"


def get(folder, path, *, token=None, host="127.0.0.1", headers=None):
    """Send one request, without following a redirect."""

    async def request():
        transport = httpx.ASGITransport(app=server.make_app(folder, token))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            await client.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"})
            return await client.get(path, headers=headers)

    return asyncio.run(request())


def test_the_page_and_its_parts_are_served_and_load_nothing_from_elsewhere(folder):
    page = get(folder, "/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    scripts = {f"/{name}.js": "javascript" for name in ("app", "chart", "timeline")}
    for path, kind in {"/": "html", "/app.css": "css", **scripts}.items():
        response = get(folder, path)
        assert response.status_code == 200
        assert kind in response.headers["content-type"]
        assert "http://" not in response.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in response.text


def test_the_list_names_all_runs(folder):
    listing = get(folder, "/api/runs").json()
    assert listing["count"] == 2
    assert {run["id"] for run in listing["runs"]} == {"one", "two"}


def test_the_timeline_and_the_config_of_a_run_are_served(folder):
    timeline = get(folder, "/api/timeline?run=one&last=2&count=1").json()
    assert (timeline["first"], timeline["last"], timeline["known"]) == (2, 2, 3)
    assert [task["device"] for task in timeline["rounds"][0]["tasks"]] == [0, 1]
    assert get(folder, "/api/config?run=one").json()["made"] == {"command": "pliant run x.toml"}


@pytest.mark.parametrize("name", ["../secret", "..%2fsecret", "/etc", "one/../../secret", "%00"])
@pytest.mark.parametrize("path", ["/api/timeline", "/api/config"])
def test_nothing_outside_the_folder_is_served(folder, path, name):
    assert get(folder, f"{path}?run={name}").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/static/app.js", "/app.css/../../server.py", "/%2e%2e/auth.py", "/runs/one"],
)
def test_no_file_is_served_by_its_path(folder, path):
    assert get(folder, path).status_code == 404


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:8347", "[::1]:8347"])
def test_without_a_token_local_host_names_are_served(folder, host):
    assert get(folder, "/", host=host).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8347"])
def test_without_a_token_a_foreign_host_name_is_refused(folder, host):
    assert get(folder, "/api/runs", host=host).status_code == 403


def test_with_a_token_every_request_needs_it(folder):
    for path in ("/", "/app.js", "/api/runs", "/api/stream", "/api/config?run=one"):
        response = get(folder, path, token=TOKEN)
        assert response.status_code == 403
        assert TOKEN not in response.text
        response = get(folder, path, token=TOKEN, headers={"cookie": "pliant_token=no"})
        assert response.status_code == 403
    assert get(folder, f"/?token={TOKEN}x", token=TOKEN).status_code == 403
    assert get(folder, f"/api/runs?token={TOKEN}", token=TOKEN).status_code == 403


def test_with_a_token_any_host_name_is_served(folder):
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert get(folder, "/", token=TOKEN, host="box.lan:8347", headers=headers).status_code == 200


def test_the_token_moves_from_the_address_into_a_cookie(folder):
    response = get(folder, f"/?token={TOKEN}", token=TOKEN)
    assert response.status_code == 303
    assert response.headers["location"] == "/"
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    headers = {"cookie": cookie.partition(";")[0]}
    assert get(folder, "/api/runs", token=TOKEN, headers=headers).json()["count"] == 2


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a folder of runs"):
        server.make_app(tmp_path / "none")


async def read_events(watcher, names, last_event_id, count):
    """Return the first events of a stream: kind, id, data."""
    events = []
    async for message in server._stream_events(watcher, names, last_event_id):
        first_line, *rest = message.decode().strip().splitlines()
        if first_line.startswith("event"):
            events.append((first_line[7:], rest[0][4:], json.loads(rest[1][6:])))
            if len(events) == count:
                return events
    return events


def test_a_page_gets_the_list_then_the_rounds_then_only_new_rounds(folder):
    async def listen():
        watcher = server.RunWatcher(folder)
        first = await read_events(watcher, ["one"], "", 2)
        with open(folder / "one" / "events.jsonl", "ab") as file:
            file.write(make_lines(3))
        return first, await read_events(watcher, ["one"], first[-1][1], 2)

    first, second = asyncio.run(listen())
    assert [kind for kind, _, _ in first] == ["runs", "rounds"]
    assert first[1][2]["columns"]["round"] == [1, 2, 3]
    data = {kind: data for kind, _, data in second}
    assert [run["id"] for run in data["runs"]["runs"]] == ["one"]
    assert data["rounds"]["from"] == 3
    assert data["rounds"]["columns"]["round"] == [4]


def test_a_restarted_server_resumes_the_stream(folder):
    async def listen():
        first = await read_events(server.RunWatcher(folder), ["two", "one"], "", 3)
        with open(folder / "one" / "events.jsonl", "ab") as file:
            file.write(make_lines(3))
        return await read_events(server.RunWatcher(folder), ["two", "one"], first[-1][1], 2)

    (kind, _, listing), (_, _, update) = asyncio.run(listen())
    assert kind == "runs"
    assert listing["count"] == len(listing["runs"]) == 2
    assert (update["run"], update["columns"]["round"]) == ("one", [4])


def test_a_run_that_went_back_to_its_checkpoint_is_sent_again(folder):
    async def listen():
        watcher = server.RunWatcher(folder)
        first = await read_events(watcher, ["one"], "", 2)
        (folder / "one" / "events.jsonl").write_bytes(make_lines(0))
        events = await read_events(watcher, ["one"], first[-1][1], 2)
        return next(data for kind, _, data in events if kind == "rounds")

    assert asyncio.run(listen())["columns"]["round"] == [1]


@pytest.mark.parametrize("event_id", ["nonsense", "a.b.c", "...", "x.9.1-2-3", "é.1.2", "-1.-1.-1"])
def test_an_invalid_event_id_starts_the_stream_over(folder, event_id):
    watcher = server.RunWatcher(folder)
    events = asyncio.run(read_events(watcher, ["one", "nobody"], event_id, 2))
    assert events[1][2]["columns"]["round"] == [1, 2, 3]

"""The server: who is let in, what is answered, and how news go on after a restart."""

import asyncio
import json

import httpx
import pytest
from written import lines, write_run

from pliant.dashboard import server

TOKEN = "a-token-of-some-length"


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "runs" / "one", 3)
    write_run(tmp_path / "runs" / "two", 4)
    write_run(tmp_path / "secret", 4)
    return tmp_path / "runs"


def get(folder, path, *, token=None, host="127.0.0.1", headers=None):
    """Ask once, without following where it leads."""

    async def ask():
        transport = httpx.ASGITransport(app=server.application(folder, token))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            await client.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"})
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_the_page_and_its_parts_are_served_and_load_nothing_from_elsewhere(folder):
    page = get(folder, "/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in server.PAGES:
        got = get(folder, path)
        assert got.status_code == 200
        assert "http://" not in got.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in got.text


def test_the_list_names_all_runs(folder):
    found = get(folder, "/api/runs").json()
    assert found["count"] == 2
    assert {run["id"] for run in found["runs"]} == {"one", "two"}


def test_the_timeline_and_the_config_of_a_run_are_answered(folder):
    shown = get(folder, "/api/timeline?run=one&last=2&count=1").json()
    assert (shown["first"], shown["last"], shown["known"]) == (2, 2, 3)
    assert [task["device"] for task in shown["rounds"][0]["tasks"]] == [0, 1]
    assert get(folder, "/api/config?run=one").json()["made"] == {"command": "pliant run x.toml"}


@pytest.mark.parametrize("name", ["../secret", "..%2fsecret", "/etc", "one/../../secret", "%00"])
@pytest.mark.parametrize("path", ["/api/timeline", "/api/config"])
def test_nothing_outside_the_folder_is_answered(folder, path, name):
    assert get(folder, f"{path}?run={name}").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/static/app.js", "/app.css/../../server.py", "/%2e%2e/door.py", "/runs/one"],
)
def test_no_file_is_served_by_its_path(folder, path):
    assert get(folder, path).status_code == 404


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:8347", "[::1]:8347"])
def test_without_a_token_this_machine_is_let_in(folder, host):
    assert get(folder, "/", host=host).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8347"])
def test_a_foreign_name_for_this_machine_is_refused(folder, host):
    assert get(folder, "/api/runs", host=host).status_code == 403


def test_with_a_token_nobody_comes_in_without_it(folder):
    for path in ("/", "/app.js", "/api/runs", "/api/stream", "/api/config?run=one"):
        answer = get(folder, path, token=TOKEN)
        assert answer.status_code == 403
        assert TOKEN not in answer.text
        assert (
            get(folder, f"{path}", token=TOKEN, headers={"cookie": "pliant_token=no"}).status_code
            == 403
        )
    assert get(folder, f"/?token={TOKEN}x", token=TOKEN).status_code == 403
    assert get(folder, f"/api/runs?token={TOKEN}", token=TOKEN).status_code == 403


def test_with_a_token_any_name_of_the_machine_is_good(folder):
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert get(folder, "/", token=TOKEN, host="box.lan:8347", headers=headers).status_code == 200


def test_the_token_moves_from_the_address_into_a_cookie(folder):
    answer = get(folder, f"/?token={TOKEN}", token=TOKEN)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    shown = {"cookie": cookie.partition(";")[0]}
    assert get(folder, "/api/runs", token=TOKEN, headers=shown).json()["count"] == 2


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a folder of runs"):
        server.application(tmp_path / "none")


async def heard(news, names, known, count):
    """Return the first events that a page hears: kind, id, data."""
    found = []
    async for raw in server._events(news, names, known):
        head, *rest = raw.decode().strip().splitlines()
        if head.startswith("event"):
            found.append((head[7:], rest[0][4:], json.loads(rest[1][6:])))
            if len(found) == count:
                return found
    return found


def test_a_page_hears_the_list_then_the_rounds_then_only_what_is_new(folder):
    async def listen():
        news = server.News(folder)
        first = await heard(news, ["one"], "", 2)
        with open(folder / "one" / "events.jsonl", "ab") as file:
            file.write(lines(3))
        return first, await heard(news, ["one"], first[-1][1], 2)

    first, second = asyncio.run(listen())
    assert [kind for kind, _, _ in first] == ["runs", "rounds"]
    assert first[1][2]["columns"]["round"] == [1, 2, 3]
    told = {kind: data for kind, _, data in second}
    assert [run["id"] for run in told["runs"]["runs"]] == ["one"]
    assert told["rounds"]["from"] == 3
    assert told["rounds"]["columns"]["round"] == [4]


def test_a_new_server_goes_on_where_the_page_was(folder):
    async def listen():
        first = await heard(server.News(folder), ["two", "one"], "", 3)
        with open(folder / "one" / "events.jsonl", "ab") as file:
            file.write(lines(3))
        return await heard(server.News(folder), ["two", "one"], first[-1][1], 2)

    (kind, _, listed), (_, _, grown) = asyncio.run(listen())
    assert kind == "runs"
    assert listed["count"] == len(listed["runs"]) == 2
    assert (grown["run"], grown["columns"]["round"]) == ("one", [4])


def test_a_run_that_went_back_is_told_from_its_start(folder):
    async def listen():
        news = server.News(folder)
        first = await heard(news, ["one"], "", 2)
        (folder / "one" / "events.jsonl").write_bytes(lines(0))
        found = await heard(news, ["one"], first[-1][1], 2)
        return next(data for kind, _, data in found if kind == "rounds")

    assert asyncio.run(listen())["columns"]["round"] == [1]


@pytest.mark.parametrize("known", ["nonsense", "a.b.c", "...", "x.9.1-2-3", "é.1.2", "-1.-1.-1"])
def test_a_strange_place_is_taken_as_the_start(folder, known):
    found = asyncio.run(heard(server.News(folder), ["one", "nobody"], known, 2))
    assert found[1][2]["columns"]["round"] == [1, 2, 3]

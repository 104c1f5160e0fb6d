import gzip
import hashlib
import json
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pliant.cli.data import app, check, get, list_sets
from pliant.data import published, store  # noqa: F401 - loaded before they are patched
from pliant.data.published import Download, File, Published

RAW = b"data" * 100_000
PACKED = gzip.compress(RAW, mtime=0)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Put one small set, served by this machine, in the place of all that are known."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PLIANT_DATA", str(tmp_path / "root"))
    served = tmp_path / "served"
    served.mkdir()
    (served / "file.gz").write_bytes(PACKED)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/file.gz"
        one = Published(
            name="small",
            title="A small set",
            folder="small",
            files=(File("file", hashlib.sha256(RAW).hexdigest()),),
            downloads=(Download(url, hashlib.sha256(PACKED).hexdigest()),),
        )
        monkeypatch.setattr("pliant.data.published.SETS", (one,))
        yield tmp_path / "root"
        server.shutdown()
        thread.join()


def test_a_set_is_listed_got_checked_and_found_damaged(small, capsys):
    list_sets()
    assert "small          missing     A small set" in capsys.readouterr().out
    assert get("small") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("file.gz: 0 % of")
    assert told[-2].startswith("file.gz: 100 % of")
    assert told[-1] == f"small: complete in {small / 'small'}"
    assert check() == 0
    assert "small          complete" in capsys.readouterr().out
    path = small / "small" / "file.gz"
    path.write_bytes(path.read_bytes()[:-10])
    assert check() == 1
    assert f"damaged: {path}" in capsys.readouterr().out


def test_another_root_can_be_named(small, tmp_path):
    get("small", data=tmp_path / "other")
    assert (tmp_path / "other" / "small" / "file.gz").read_bytes() == PACKED


def test_json_is_one_array(small, capsys):
    check(json=True)
    digits, found = json.loads(capsys.readouterr().out)
    assert (digits["name"], digits["state"]) == ("digits", "complete")
    assert (found["name"], found["state"]) == ("small", "missing")
    list_sets(json=True)
    assert json.loads(capsys.readouterr().out)[1]["name"] == "small"


def test_a_bar_is_shown_on_a_terminal(small, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert get("small") == 0
    assert "file.gz" in capsys.readouterr().out


def test_an_unknown_name_is_refused(small):
    with pytest.raises(LookupError, match="expected one of small, got large"):
        get("large")


def test_the_words_of_the_command_line_reach_the_functions(small, capsys):
    app(["get", "small", "--data", str(small)], result_action="return_value")
    assert app(["check", "--json"], result_action="return_value") == 0
    assert '"complete"' in capsys.readouterr().out


def test_the_commands_are_known_without_torch():
    code = "import sys, pliant.cli.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_data_layer_does_without_its_extras():
    code = "import sys, pliant.data; sys.exit(bool({'matplotlib', 'PIL'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

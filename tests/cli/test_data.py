import gzip
import hashlib
import json
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pliant.cli.data import app, check, get, list_datasets
from pliant.data import digits, sources
from pliant.data.download.published import DataFile, DatasetManifest, Download
from pliant.data.sources import DATASETS, NamedDataset

RAW = b"data" * 100_000
PACKED = gzip.compress(RAW, mtime=0)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture
def data_root(tmp_path, monkeypatch):
    """Replace the known data sets by a small one served by this machine."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PLIANT_DATA", str(tmp_path / "root"))
    served = tmp_path / "served"
    served.mkdir()
    (served / "file.gz").write_bytes(PACKED)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(QuietHandler, directory=str(served))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/file.gz"
        manifest = DatasetManifest(
            name="small",
            title="A small set",
            folder="small",
            files=(DataFile("file", hashlib.sha256(RAW).hexdigest()),),
            downloads=(Download(url, hashlib.sha256(PACKED).hexdigest()),),
        )
        datasets = {"digits": DATASETS["digits"], "small": NamedDataset(digits, manifest)}
        monkeypatch.setattr("pliant.data.sources.DATASETS", datasets)
        yield tmp_path / "root"
        server.shutdown()
        thread.join()


def test_a_data_set_is_listed_downloaded_checked_and_found_damaged(data_root, capsys):
    list_datasets()
    assert "small          missing     A small set" in capsys.readouterr().out
    assert get("small") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("file.gz: 0 % of")
    assert lines[-2].startswith("file.gz: 100 % of")
    assert lines[-1] == f"small: complete in {data_root / 'small'}"
    assert check() == 0
    assert "small          complete" in capsys.readouterr().out
    path = data_root / "small" / "file.gz"
    path.write_bytes(path.read_bytes()[:-10])
    assert check() == 1
    assert f"damaged: {path}" in capsys.readouterr().out


def test_the_data_root_can_be_chosen(data_root, tmp_path):
    get("small", data=tmp_path / "other")
    assert (tmp_path / "other" / "small" / "file.gz").read_bytes() == PACKED


def test_json_output_is_one_array(data_root, capsys):
    check(json=True)
    first, small = json.loads(capsys.readouterr().out)
    assert (first["name"], first["state"]) == ("digits", "complete")
    assert (small["name"], small["state"]) == ("small", "missing")
    list_datasets(json=True)
    assert json.loads(capsys.readouterr().out)[1]["name"] == "small"


def test_a_bar_is_shown_on_a_terminal(data_root, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert get("small") == 0
    assert "file.gz" in capsys.readouterr().out


def test_a_name_may_have_hyphens(data_root, monkeypatch):
    monkeypatch.setitem(sources.DATASETS, "very_small", sources.DATASETS["small"])
    assert get("very-small") == 0


def test_an_unknown_name_is_refused(data_root):
    with pytest.raises(LookupError, match="expected one of digits, small, got 'large'"):
        get("large")


def test_command_line_arguments_reach_the_functions(data_root, capsys):
    app(["get", "small", "--data", str(data_root)], result_action="return_value")
    assert app(["check", "--json"], result_action="return_value") == 0
    assert '"complete"' in capsys.readouterr().out


def test_the_commands_are_defined_without_torch():
    code = "import sys, pliant.cli.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_data_layer_imports_no_extras():
    code = "import sys, pliant.data; sys.exit(bool({'matplotlib', 'PIL'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

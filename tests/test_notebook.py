"""The notebook runs, and what it shows is short."""

from pathlib import Path

import nbclient
import nbformat
import pytest
import torch

import pliant as pl

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"


@pytest.mark.slow  # test_tutorial.py and test_examples.py run the same calls
@pytest.mark.filterwarnings("ignore")  # of the kernel's libraries
def test_the_notebook_runs_and_shows_tables_figures_and_progress(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ())]
    tables = [data["text/html"] for data in outputs if "<table" in data.get("text/html", "")]
    assert len(tables) == 5  # network, data, fleet, record, frame
    bars = [data["text/plain"] for data in outputs if "<progress" in data.get("text/html", "")]
    assert bars == ["4 of 4 rounds"] * 2
    assert sum("image/png" in data for data in outputs) == 3


@pytest.fixture(scope="module")
def data():
    return pl.data.digits().share(pl.Iid(), devices=12, proxy=7000)


def test_reprs_are_short_and_say_what_a_thing_is(data):
    net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    table = pl.uniform_table(net, rows=3)
    speed = pl.ConstantTrace(0.5)
    task = pl.TaskRecord(0, 7, "late", 0, 0, 5e6, 0.0, 9e6, 9, 0, 1.0, 0.0, starts=(0.1,) * 50)
    assert repr(data.train) == "ImageDataset(digits: 8,000 of 1x28x28, 10 classes)"
    assert repr(data).startswith("FederatedData(digits: 12 devices with 83 to 84 images")
    assert repr(net) == f"Elastic(CnnNetwork: 2 sites, {net.macs(0.0):,.0f} MACs)".replace(
        "CnnNetwork", type(net.module).__name__
    )
    assert repr(table) == f"ParetoTable(3 rows of 2 rates, cost {table.shares[0]:.3g} to 1)"
    assert repr(pl.Fleet(1000, speed=speed)) == f"Fleet(1,000 devices, device, speed={speed})"
    assert "starts=(0.1, 0.1, 0.1, … 50 in all)" in repr(task)
    assert "ends" not in repr(task)  # as by default


def test_html_tables_have_the_numbers_and_escape_names(data):
    assert data._repr_html_().count("<tr>") == 11  # a header and ten of twelve devices
    fleet = pl.Fleet(3, classes=(pl.DeviceClass(name="<b>", up=2e6),))
    assert "<td>&lt;b&gt;</td><td>100%</td>" in fleet._repr_html_()
    assert "<td>2 MB/s</td><td>no limit</td>" in fleet._repr_html_()
    net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    site = net.sites[0]
    assert f"<td>{site.filters}</td><td>{site.macs:,}</td>" in net._repr_html_()
    assert pl.uniform_table(net, rows=3)._repr_html_().count("<tr>") == 4


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """Return a run's folder as text: every function takes both."""
    folder = str(tmp_path_factory.mktemp("runs") / "run")
    net, fleet = pl.models.digits_cnn(), pl.Fleet(size=12)
    list(pl.simulate(pl.FedAvg(), net, data, fleet, rounds=2, folder=folder))
    return folder


def test_a_frame_has_a_row_per_round_or_task(run):
    records = [record for record in pl.read_records(run) if isinstance(record, pl.RoundRecord)]
    rounds, tasks = pl.frame(run), pl.frame(Path(run), "tasks")
    assert rounds["accuracy"].tolist() == [record.accuracy for record in records]
    assert rounds["score.loss"].tolist() == [record.score.loss for record in records]
    assert tasks["macs"].sum() == pytest.approx(rounds["macs"].sum())


def test_a_frame_has_the_numbers_that_duckdb_reads(run):
    duckdb = pytest.importorskip("duckdb")
    for kind in ("round", "task"):
        query = "SELECT macs, up, down, seconds FROM read_json(?) WHERE type = ?"
        with duckdb.connect() as connection:
            columns = connection.execute(query, [f"{run}/events.jsonl", kind]).fetchnumpy()
        frame = pl.frame(run, f"{kind}s")
        assert {name: frame[name].tolist() for name in columns} == {
            name: column.tolist() for name, column in columns.items()
        }


def test_a_frame_of_an_active_run_has_its_complete_records(run, tmp_path):
    lines = Path(run, "events.jsonl").read_bytes().splitlines(keepends=True)
    assert b'"type":"round"' in lines[-1]
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines)[:-40])
    assert pl.frame(tmp_path)["round"].tolist() == [0]
    assert len(pl.frame(tmp_path, "tasks")) == len(pl.frame(run, "tasks"))


def test_figures_are_those_of_matplotlib(run):
    curve = pl.plot.curves(run, axis="rounds")
    (line,) = [line for line in curve.axes[0].lines if len(line.get_xdata())]
    assert line.get_xdata().tolist() == [1.0, 2.0]
    assert pl.plot.timeline(run, rounds=1).axes[0].get_xlabel() == "seconds"
    net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    with pytest.raises(ValueError, match="expected a table with gains, found none"):
        pl.plot.front(pl.uniform_table(net, rows=3))
    with pytest.raises(ValueError, match="expected two evaluated groups of runs, found none"):
        pl.plot.tradeoff(run)
    with pytest.raises(ValueError, match="Expected an axis of rounds, seconds, macs, bytes"):
        pl.plot.curves(run, axis="time")


def test_paths_may_be_text(run, tmp_path):
    assert pl.load_trained_params(run).keys() == pl.load_trained_params(Path(run)).keys()
    net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    table, path = pl.uniform_table(net, rows=3), str(tmp_path / "table.safetensors")
    assert pl.load_table(pl.save_table(path, table)) == pl.load_table(path) == table
    (tmp_path / "speeds.csv").write_text("seconds,speed\n0,1.0\n")
    trace = pl.RecordedTrace(tmp_path / "speeds.csv")
    assert trace == pl.RecordedTrace(str(tmp_path / "speeds.csv"))

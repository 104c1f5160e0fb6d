"""The example of a Flower app says why an answer did not count."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_flower_app import local_grid

# Flower's old Typer warns under a new Click when it is imported
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_app" / "flower_app"


def test_it_prints_why_an_answer_was_refused(capsys):
    from flwr.app import ConfigRecord, Message, RecordDict

    from pliant.deploy.letters import Answer, packed
    from pliant.deploy.link import content

    main = runpy.run_path(str(EXAMPLE / "server_app.py"))["main"]

    def only_greeting(message, context):
        number = context.node_config["partition-id"]
        is_training = message.metadata.group_id == "0"
        said = RecordDict() if is_training else content(packed(Answer("hello", number)))
        said["device"] = ConfigRecord({"number": number})
        return Message(said, reply_to=message)

    context = SimpleNamespace(run_config={"rounds": 1, "seconds": 30.0})
    main(local_grid(only_greeting, {5: 0, 6: 1, 7: 2}), context)
    told = [line for line in capsys.readouterr().out.splitlines() if "did not count" in line]
    assert len(told) == 3
    assert told[1].startswith("round 1: device 1 did not count: rejected: device 1: expected")

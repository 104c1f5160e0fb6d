"""The example Flower app prints why a reply was rejected."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.deploy.flower.test_strategy import make_local_grid

# importing Flower's old Typer warns under a new Click
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EXAMPLE = Path(__file__).parents[3] / "examples" / "flower_app" / "flower_app"


def test_it_prints_why_a_reply_was_rejected(capsys):
    from flwr.app import ConfigRecord, Message, RecordDict

    from pliant.deploy.flower.client_app import make_content
    from pliant.deploy.messages import TrainReply, encode_message

    main = runpy.run_path(str(EXAMPLE / "server_app.py"))["main"]

    def reply_to_hello_only(message, context):
        number = context.node_config["partition-id"]
        content = make_content(encode_message(TrainReply("hello", number)))
        if message.metadata.group_id == "0":  # a training request
            content = RecordDict()
        content["device"] = ConfigRecord({"number": number})
        return Message(content, reply_to=message)

    context = SimpleNamespace(run_config={"rounds": 1, "seconds": 30.0})
    main(make_local_grid(reply_to_hello_only, {5: 0, 6: 1, 7: 2}), context)
    lines = [line for line in capsys.readouterr().out.splitlines() if "not merged" in line]
    assert len(lines) == 3
    assert lines[1].startswith("round 1: device 1 was not merged: rejected: device 1: expected")

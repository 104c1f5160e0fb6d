"""An app of a user's with pliant in it: Flower's own objects, and once its real simulation."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from near import described, simulated

# Flower's old Typer warns under a new Click when it is imported
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def local_grid(app, nodes):
    """Return a grid that calls a ClientApp for each message, as Flower's simulation does."""
    from flwr.app import Context, RecordDict
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    class LocalGrid(Grid):
        run = None

        def __init__(self):
            self.waiting = {}

        def set_run(self, run):
            raise NotImplementedError

        def create_message(self, *given):
            raise NotImplementedError

        def get_node_ids(self):
            return list(nodes)

        def get_nodes(self):
            return [NodeInfo(node_id=node) for node in nodes]

        def push_messages(self, messages):
            found = []
            for number, message in enumerate(messages):
                identity = f"{len(self.waiting)}-{number}"
                message.metadata.__dict__["_message_id"] = identity
                node = message.metadata.dst_node_id
                config = {"partition-id": nodes[node], "num-partitions": len(nodes)}
                context = Context(1, node, config, RecordDict(), {}, 1)
                reply = app(message, context)
                reply.metadata.__dict__["_src_node_id"] = node
                self.waiting[identity] = reply
                found.append(identity)
            return found

        def pull_messages(self, message_ids):
            return [self.waiting.pop(key) for key in list(message_ids) if key in self.waiting]

        def send_and_receive(self, messages, *, timeout=None):
            return self.pull_messages(self.push_messages(messages))

    return LocalGrid()


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_the_strategy_ends_with_the_simulated_weights(tmp_path, method):
    from pliant.deploy.flower import PliantStrategy, client_app
    from pliant.params import digest

    experiment = described(method)
    strategy = PliantStrategy(experiment)
    # random node ids, in another order than the partitions
    grid = local_grid(client_app(tmp_path), {900: 1, 17: 2, 555: 0})
    result = strategy.start(grid, strategy.arrays(), num_rounds=2)
    assert digest(dict(result.arrays.to_torch_state_dict())) == simulated(experiment)
    assert result.train_metrics_clientapp[2]["devices"] == 3


def test_a_bad_reply_is_refused_and_named(tmp_path):
    from flwr.app import Message, RecordDict
    from flwr.clientapp import ClientApp

    from pliant.deploy.flower import PliantStrategy, client_app

    experiment = described(rounds=1)
    good = client_app(tmp_path)

    def app(message, context):
        reply = good(message, context)
        is_training = message.metadata.group_id == "0"
        if context.node_config["partition-id"] == 1 and is_training:
            return Message(RecordDict(), reply_to=message)
        return reply

    assert isinstance(good, ClientApp)
    strategy = PliantStrategy(experiment)
    strategy.start(local_grid(app, {5: 0, 6: 1, 7: 2}), strategy.arrays(), num_rounds=1)
    assert set(strategy.refused) == {1}
    assert strategy.refused[1].startswith("rejected: device 1: expected a whole letter")


@pytest.mark.slow
def test_flwr_run_simulates_the_example(tmp_path):
    pytest.importorskip("ray")
    from pliant.deploy.processes import environment, script

    example = Path(__file__).parents[2] / "examples" / "flower_app"
    app = shutil.copytree(example, tmp_path / "app")
    command = [script("flwr"), "run", str(app), "--stream"]
    env = environment(tmp_path / "home")
    try:
        done = subprocess.run(
            [*command, "--federation-config", "num-supernodes=3"],
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    finally:
        for path in Path("/proc").glob("[0-9]*/cmdline"):  # it leaves its SuperLink behind
            if path.exists() and str(tmp_path / "home") in path.read_text():
                os.kill(int(path.parent.name), 15)
    losses = re.findall(
        r"^round \d: {'devices': 3, 'refused': 0, 'loss': ([\d.]+)}", done.stdout, re.M
    )
    assert len(losses) == 3, done.stdout + done.stderr
    assert float(losses[2]) < float(losses[0])

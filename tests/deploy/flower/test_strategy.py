"""A user's Flower app with pliant in it: Flower's own objects, and once its real simulation."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.deploy.in_process import compute_simulated_digest, make_experiment
from tests.waiting import LIMIT

# importing Flower's old Typer warns under a new Click
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def make_local_grid(app, nodes):
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

        def create_message(self, *_):
            raise NotImplementedError

        def get_node_ids(self):
            return list(nodes)

        def get_nodes(self):
            return [NodeInfo(node_id=node) for node in nodes]

        def push_messages(self, messages):
            message_ids = []
            for number, message in enumerate(messages):
                message_id = f"{len(self.waiting)}-{number}"
                message.metadata.__dict__["_message_id"] = message_id
                node = message.metadata.dst_node_id
                config = {"partition-id": nodes[node], "num-partitions": len(nodes)}
                context = Context(1, node, config, RecordDict(), {}, 1)
                reply = app(message, context)
                reply.metadata.__dict__["_src_node_id"] = node
                self.waiting[message_id] = reply
                message_ids.append(message_id)
            return message_ids

        def pull_messages(self, message_ids):
            return [self.waiting.pop(key) for key in list(message_ids) if key in self.waiting]

        def send_and_receive(self, messages, *, timeout=None):
            return self.pull_messages(self.push_messages(messages))

    return LocalGrid()


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_the_strategy_ends_with_the_simulated_weights(tmp_path, method):
    from pliant.deploy.flower.strategy import PliantStrategy, make_client_app
    from pliant.params import digest

    experiment = make_experiment(method)
    strategy = PliantStrategy(experiment)
    # random node ids, in a different order from the partitions
    grid = make_local_grid(make_client_app(tmp_path), {900: 1, 17: 2, 555: 0})
    result = strategy.start(grid, strategy.arrays(), num_rounds=2)
    assert digest(dict(result.arrays.to_torch_state_dict())) == compute_simulated_digest(experiment)
    assert result.train_metrics_clientapp[2]["devices"] == 3


def test_a_bad_reply_is_rejected_with_a_reason(tmp_path):
    from flwr.app import Message, RecordDict
    from flwr.clientapp import ClientApp

    from pliant.deploy.flower.strategy import PliantStrategy, make_client_app

    experiment = make_experiment(rounds=1)
    good = make_client_app(tmp_path)

    def app(message, context):
        reply = good(message, context)
        is_training = message.metadata.group_id == "0"
        if context.node_config["partition-id"] == 1 and is_training:
            return Message(RecordDict(), reply_to=message)
        return reply

    assert isinstance(good, ClientApp)
    strategy = PliantStrategy(experiment)
    strategy.start(make_local_grid(app, {5: 0, 6: 1, 7: 2}), strategy.arrays(), num_rounds=1)
    assert set(strategy.rejected) == {1}
    assert strategy.rejected[1].startswith("rejected: device 1: expected an intact message")


@pytest.mark.slow
def test_flwr_run_simulates_the_example(tmp_path):
    pytest.importorskip("ray")
    from pliant.deploy.supervise.child_process import make_process_env

    example = Path(__file__).parents[3] / "examples" / "flower_app"
    app = shutil.copytree(example, tmp_path / "app")
    command = ["flwr", "run", str(app), "--stream"]
    env = make_process_env(tmp_path / "home")
    try:
        result = subprocess.run(
            [*command, "--federation-config", "num-supernodes=3"],
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    finally:
        for path in Path("/proc").glob("[0-9]*/cmdline"):  # it leaves its SuperLink running
            if path.exists() and str(tmp_path / "home") in path.read_text():
                os.kill(int(path.parent.name), 15)
    pattern = r"^round \d: {'devices': 3, 'refused': 0, 'loss': ([\d.]+), 'accuracy': [\d.]+}"
    losses = re.findall(pattern, result.stdout, re.M)
    assert len(losses) == 3, result.stdout + result.stderr
    assert float(losses[2]) < float(losses[0])

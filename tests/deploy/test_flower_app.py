"""Flower's own objects, without its processes: an app of a user's with pliant in it."""

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

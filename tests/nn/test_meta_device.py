"""Nothing assumes a CPU: steps, statistics and checks stay on the device of the network.

The meta device, which has shapes but no numbers, stands in for a GPU.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.nn.families import normed
from torch import nn
from torch.nn.utils import parametrizations

import pliant as pl
from pliant.engine.local_work import iter_steps
from pliant.engine.worker_context import build_context
from pliant.methods.validation import check_tensors, make_specs
from pliant.nn.elastic import elastic
from pliant.nn.norm_statistics import ReestimatedStats, prepare_norm_statistics
from pliant.nn.trainer import SubnetTrainer
from pliant.params import get_params

IMAGE = torch.zeros(4, 3, 32, 32)
NETWORKS = {
    "resnet20": (pl.models.resnet20, IMAGE),
    "vit_small": (partial(pl.models.vit_small, depth=1), IMAGE),
    "text_transformer": (
        partial(pl.models.text_transformer, depth=1),
        torch.zeros(4, 64, dtype=torch.long),
    ),
    "signal_cnn": (pl.models.signal_cnn, torch.zeros(4, 3, 32)),
    "group norm": (normed.make_standardised, IMAGE),
    "shuffle": (partial(normed.make_shufflenet, normed.shuffle_like_torchvision), IMAGE),
    "weight norm": (partial(normed.make_normed, parametrizations.weight_norm), IMAGE),
    "LSTM": (partial(normed.TextRecurrent, nn.LSTM), torch.zeros(4, 9, dtype=torch.long)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_runs_where_the_network_is(name):
    make, x = NETWORKS[name]
    module = make().to("meta")
    net = elastic(module, x)  # an example on the CPU
    trainer = SubnetTrainer(net, get_params(module), pl.Adam(lr=0.1))
    for step in range(2):
        trainer.switch(net.draw(0.5, pl.rng_stream(0, "dropout", step)))
        loss = trainer.step(x.to("meta"), lambda out: out.square().mean())
        assert loss.is_meta
    trained = trainer.params()
    assert all(tensor.is_meta for tensor in trained.values())
    assert {n: t.shape for n, t in trained.items()} == {
        n: t.shape for n, t in module.state_dict().items()
    }


def test_mini_batches_and_statistics_are_moved_to_the_network():
    data = pl.data.digits().share(pl.Iid(), devices=4, proxy=20)
    module = pl.models.digits_cnn_bn().to("meta")
    context = build_context(module, data, pl.HeteroFl(local=pl.LocalTraining(batch=4)))
    choices = [(0, 1.0), None]
    [step] = iter_steps(context, pl.TaskKey(0, 0, 1), choices.__getitem__)
    assert step.x.is_meta
    assert step.y.is_meta
    loss = F.cross_entropy(
        context.net.run(context.net.take(get_params(module), step.subnet), step.subnet, step.x),
        step.y,
    )
    assert loss.is_meta
    params = prepare_norm_statistics(
        module,
        get_params(module),
        ReestimatedStats(samples=8, batch=4),
        lambda samples, batch: [torch.zeros(batch, 1, 28, 28)] * (samples // batch),
    )
    assert all(tensor.is_meta for tensor in params.values())


def test_a_tensor_must_be_on_the_device_of_the_network():
    here, there = {"w": torch.zeros(2)}, {"w": torch.zeros(2, device="meta")}
    assert not [*check_tensors("delta", there, make_specs(there))]
    assert not [*check_tensors("delta", here, make_specs(here))]
    for tensors, expected, device in ((there, here, "meta"), (here, there, "cpu")):
        [problem] = check_tensors("delta", tensors, make_specs(expected))
        assert problem.endswith(f"got one on {device}")

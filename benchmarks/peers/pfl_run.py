"""FedAvg in pfl-research, after its own benchmark of image classification."""

import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from workload import BATCH, LR, PER_ROUND, CifarCnn, evaluate, load_workload, read_arguments, report

started = time.perf_counter()
torch.set_num_threads(1)


class Model(CifarCnn):
    """The network with the two methods that pfl calls."""

    def loss(self, images: Any, labels: Any, is_eval: bool = False) -> torch.Tensor:
        self.eval() if is_eval else self.train()
        return F.cross_entropy(self(images), labels)

    @torch.no_grad()
    def metrics(self, images: Any, labels: Any, is_eval: bool = True) -> dict[str, Weighted]:
        return {
            "loss": Weighted(self.loss(images, labels, is_eval).item() * len(labels), len(labels))
        }


class Clock(TrainingProcessCallback):
    """Note when each round ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.ends.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.ends.append(time.perf_counter())
        return False, Metrics()


args = read_arguments()
workload = load_workload(args.data)
torch.manual_seed(0)
np.random.seed(0)
net = Model()
clock = Clock()
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=args.rounds,
        evaluation_frequency=args.rounds + 1,
        train_cohort_size=PER_ROUND,
        val_cohort_size=0,
    ),
    backend=SimulatedBackend(
        training_data=FederatedDataset(
            lambda index: Dataset(list(workload.get_device(index))),
            get_user_sampler("random", list(range(len(workload)))),
        ),
        val_data=None,
        postprocessors=[WeightByDatapoints()],
    ),
    model=PyTorchModel(
        model=net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    ),
    model_train_params=NNTrainHyperParams(
        local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR
    ),
    model_eval_params=NNEvalHyperParams(local_batch_size=500),
    callbacks=[clock],
)
accuracy = evaluate(net, workload)
report(list(np.diff(clock.ends)), [(time.perf_counter() - started, accuracy)], started)

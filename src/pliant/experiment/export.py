"""Export the network of a run to a model file."""

from pathlib import Path

from torch import nn

from pliant.data import FederatedData
from pliant.data.class_names import get_class_names
from pliant.engine.evaluation import settle_statistics
from pliant.engine.ledger import RoundRecord
from pliant.engine.run_store import load_trained_round, read_records
from pliant.experiment.config import Experiment
from pliant.experiment.model_file import ModelFormat, ModelInfo, describe_input, write_model


def export_run(
    folder: Path,
    path: Path,
    kind: ModelFormat,
    experiment: Experiment,
    net: nn.Module,
    data: FederatedData,
) -> ModelInfo:
    """Write the network in the newest checkpoint of a run, given its inputs, to a model file.

    Its norm statistics are those that the run evaluates with, so its accuracy is the recorded one.
    """
    rounds, trained = load_trained_round(folder)
    params = settle_statistics(net, trained, data, experiment.evaluation)
    records = (record for record in read_records(folder) if isinstance(record, RoundRecord))
    accuracy = {record.round + 1: record.accuracy for record in records}.get(rounds)
    network = experiment.network
    names = get_class_names(data.train.name, data.train.classes)
    info = ModelInfo(
        network=Path(network.name).name,  # a user's own is `file.py:function`
        options=network.options,
        classes=names if network.input is None else network.image_form.names,
        input=describe_input(data.train),
        num_params=sum(tensor.numel() for tensor in net.parameters()),
        rounds=rounds,
        accuracy=accuracy,
    )
    write_model(path, net, params, info, kind)
    return info

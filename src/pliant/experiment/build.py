"""Build the network and data of an experiment, and run it."""

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from pliant import rng
from pliant.data import AnyPartition, FederatedData, Iid, ImageDataset, TrainTestData, load_dataset
from pliant.data.declared import DeclaredData
from pliant.data.mixtures import MIXTURES, join_clients
from pliant.data.own_images import ImageForm, OwnImages, read_own_images, wrap_own_images
from pliant.engine.checks import (
    check_asynchronous,
    check_average,
    check_privacy,
    check_step_time,
    check_trainable,
)
from pliant.engine.evaluation import Evaluation
from pliant.engine.ledger import RoundRecord
from pliant.engine.simulate import simulate
from pliant.engine.split_loop import (
    check_simulated_deadline,
    check_split_rules,
    simulate_split,
)
from pliant.engine.worker_context import WorkerContext, build_context
from pliant.experiment.config import DataConfig, Experiment, NetworkConfig, SearchRun
from pliant.experiment.user_code import is_user_function, load_function
from pliant.methods.state import init_states
from pliant.methods.verbs import Method, SharesPredictions, get_inner_method
from pliant.nn.cut import split_network
from pliant.nn.exits import ExitNetwork
from pliant.nn.models import MODELS, SEQUENCE_MODELS
from pliant.nn.models.initialisation import check_types
from pliant.nn.norm_statistics import RunningStats
from pliant.params import get_params
from pliant.split import AnySplit
from pliant.split.session import ClientFactory, Session
from pliant.suggestions import did_you_mean
from pliant.workers.pool import AnyWorkers


def build_experiment(experiment: Experiment) -> tuple[nn.Module, FederatedData]:
    """Build the network and the data, deterministically."""
    # fail now if a method cannot be loaded or a recording cannot be read
    method = None if isinstance(experiment.method, AnySplit) else experiment.federated_method
    experiment.fleet.check_traces()
    config, network = experiment.data, experiment.network
    if config.name in MIXTURES:
        data = _build_mixture(config, experiment.seed)
    else:
        devices = config.devices or experiment.fleet.size
        data = _partition_data(config, config.partition, devices, experiment.seed)
    if isinstance(experiment.method, AnySplit):
        check_split_rules(experiment.settings, experiment.fleet, len(data))
        if config.grows is not None:
            raise ValueError("Expected no `data.grows`: split methods use all images of a client")
    if config.device_tests is not None:
        data = data.hold_out_tests(config.device_tests, experiment.seed)
    if config.grows is not None:
        data = data.grow(config.grows, experiment.seed)
    if network.input is not None:
        expected, found = network.image_form, data.train
        if (expected.shape, len(expected.names)) != (found.shape, found.classes):
            raise ValueError(
                f"Expected `input` and `classes` in [network] as in [data], {found.shape} and "
                f"{found.classes}, got {expected.shape} and {len(expected.names)}"
            )
    return _build_checked_network(experiment, data, method), data


def _build_checked_network(
    experiment: Experiment, data: FederatedData, method: Method | None
) -> nn.Module:
    net = build_network(experiment.network, data, experiment.seed)
    if is_user_function(experiment.network.name):
        _check_output(experiment.network.name, net, data)
    if method is not None:
        check_asynchronous(method, experiment.settings, experiment.fleet)
        check_average(method, experiment.settings)
        init_states(get_inner_method(method), get_params(net))  # fail now if one cannot be saved
        options = experiment.network.elastic_options
        check_trainable(method, net, data, experiment.evaluation, options)
        check_privacy(method, net, experiment.settings)
        check_step_time(method, experiment.settings, experiment.fleet)
    return net


def _check_output(name: str, net: nn.Module, data: FederatedData) -> None:
    """Raise if a user's network has not one score per class; say nothing if it fails altogether."""
    if isinstance(net, ExitNetwork):  # it has several outputs
        return
    is_training, classes = net.training, data.train.classes
    try:
        with torch.no_grad():
            output = net.eval()(data.make_example())
    except Exception:  # tracing it will say more
        return
    finally:
        net.train(is_training)
    found = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
    if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[1] < classes:
        raise ValueError(
            f"network {name}: expected an output with a score for each of {classes} classes, got "
            f"{found}"
        )


def build_run_context(experiment: Experiment, *, check: bool = True) -> WorkerContext:
    """Build what the server and the devices of a federated run share."""
    check_deployable(experiment)
    net, data = build_experiment(experiment)
    options = experiment.network.elastic_options
    method = get_inner_method(experiment.federated_method)
    return build_context(net, data, method, options, check=check)


def check_deployable(experiment: Experiment) -> None:
    """Raise if only simulated devices can run a federated experiment."""
    virtual = {
        "seconds": experiment.seconds,
        "evaluation.every_seconds": experiment.evaluation.every_seconds,
        "data.grows": experiment.data.grows,
        "step_time": experiment.step_time,
    }
    for name, value in virtual.items():
        if value is not None:
            raise ValueError(
                f"Expected no `{name}` for a run on real devices: it counts virtual seconds"
            )
    if isinstance(experiment.federated_method, SharesPredictions):
        raise ValueError(
            f"Expected a method for real devices, got {type(experiment.federated_method).__name__}"
            ": it needs proxy images on every device, which only simulated ones have"
        )


def check_simulated(experiment: Experiment) -> None:
    """Raise if only real devices can run an experiment."""
    if isinstance(experiment.method, AnySplit):
        check_simulated_deadline(experiment.rules)


def check_cut(experiment: Experiment, net: nn.Module, data: FederatedData) -> None:
    """Raise if the network cannot be split as a split method wants it."""
    if isinstance(experiment.method, AnySplit):
        split_network(net, data.make_example(), experiment.method.cut)


def build_server_context(experiment: Experiment) -> WorkerContext:
    """Build the context of a server whose devices bring their own data: it reads none of theirs."""
    check_deployable(experiment)
    data = load_server_data(experiment)
    method, options = experiment.federated_method, experiment.network.elastic_options
    net = _build_checked_network(experiment, data, method)
    return build_context(net, data, get_inner_method(method), options)


def load_server_data(experiment: Experiment) -> DeclaredData:
    """Load the images of a server whose devices bring their own."""
    form, config = experiment.network.image_form, experiment.server
    proxy, holdout = (
        None if source is None else load_server_images(source, form)
        for source in (config.proxy, config.holdout)
    )
    return DeclaredData.make(form, experiment.fleet.size, holdout=holdout, proxy=proxy)


def build_device_context(experiment: Experiment, data: FederatedData) -> WorkerContext:
    """Build the context of a device with its own data; the server has checked the network."""
    net = build_network(experiment.network, data, experiment.seed)
    method, options = experiment.federated_method, experiment.network.elastic_options
    check_trainable(method, net, data, Evaluation(statistics=RunningStats()), options)
    return build_context(net, data, get_inner_method(method), options, check=False)


def choose_statistics(experiment: Experiment) -> Experiment:
    """Use the running norm statistics if the server has no proxy to re-estimate them on."""
    if experiment.server.proxy is not None:
        return experiment
    return replace(experiment, evaluation=replace(experiment.evaluation, statistics=RunningStats()))


def load_own_images(source: str, form: ImageForm) -> OwnImages:
    """Load images from a folder, a file or a user's function."""
    if is_user_function(source):
        return wrap_own_images(load_function(source)(), form, source)
    return read_own_images(Path(source), form)


def load_server_images(source: str, form: ImageForm) -> ImageDataset:
    """Load images that are not divided into two parts."""
    images = load_own_images(source, form)
    if images.test is not None:
        raise ValueError(f"{source}: expected images in one part, got a training and a test part")
    if not len(images.train):
        raise ValueError(f"{source}: expected images, found none")
    return images.train


def build_session(
    experiment: Experiment,
    *,
    make_client: ClientFactory | None = None,
    only_client: int | None = None,
    data: FederatedData | None = None,
) -> Session:
    """Build what the server and the devices of a split run share; they may have data already."""
    if data is None:
        net, data = build_experiment(experiment)
    else:
        net = build_network(experiment.network, data, experiment.seed)
    method, fleet, seed = experiment.split_method, experiment.fleet, experiment.seed
    return Session(method, net, data, fleet, seed, make_client=make_client, only_client=only_client)


@lru_cache(maxsize=2)  # the runs of a sweep share their images
def _build_mixture(config: DataConfig, seed: int) -> FederatedData:
    mixture = MIXTURES[config.name](Path(config.root) if config.root else None, seed)
    return join_clients(mixture, max_samples=config.samples, max_tests=config.tests, seed=seed)


def run_experiment(
    experiment: Experiment,
    net: nn.Module,
    data: FederatedData,
    *,
    workers: AnyWorkers,
    folder: Path,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[RoundRecord]:
    """Run an experiment in the engine that its method needs, and yield its rounds."""
    start: Callable[..., Iterator[RoundRecord]]
    if isinstance(experiment.method, AnySplit):
        start = partial(simulate_split, experiment.method, server_speed=experiment.server_speed)
    else:
        options = experiment.network.elastic_options
        start = partial(simulate, experiment.federated_method, elastic_options=options)
    return start(
        net,
        data,
        experiment.fleet,
        settings=experiment.settings,
        workers=workers,
        make_inputs=partial(build_experiment, experiment),
        folder=folder,
        is_stopped=is_stopped,
    )


def build_search(run: SearchRun) -> tuple[nn.Module, ImageDataset]:
    """Build the network and the proxy images, those that a run with the same seed holds back."""
    if run.network.input is not None:
        if run.server.proxy is None:
            raise ValueError(
                "Expected `proxy` in [server], images to search on while devices keep theirs, "
                "found none"
            )
        form = run.network.image_form
        proxy = load_server_images(run.server.proxy, form)
        return build_network(run.network, DeclaredData.make(form, 1), run.seed), proxy
    data = _partition_data(run.data, Iid(), 1, run.seed)
    return build_network(run.network, data, run.seed), data.proxy


def _partition_data(
    config: DataConfig, partition: AnyPartition, devices: int, seed: int
) -> FederatedData:
    source = _load_data(config)
    return source.share(partition, devices, seed, proxy=config.proxy, proxy_seed=config.proxy_seed)


def _load_data(config: DataConfig) -> TrainTestData:
    if not is_user_function(config.name):
        return load_dataset(config.name, Path(config.root) if config.root else None)
    data = load_function(config.name)()
    if not isinstance(data, TrainTestData):
        raise ValueError(
            f"{config.name}: expected a pliant.data.TrainTestData, got {type(data).__name__}"
        )
    return data


def _describe_samples(data: FederatedData) -> dict[str, int]:
    """Return the options of a network that follow from what it is trained on."""
    shape = data.train.shape
    if len(shape) == 1:
        vocabulary = max(data.train.vocabulary, data.test.vocabulary)
        return {"length": shape[0], "vocabulary": vocabulary}
    sizes = {"side": shape[1]} if len(shape) == 3 else {"length": shape[1]}
    return {"channels": shape[0], **sizes}


def build_network(network: NetworkConfig, data: FederatedData, seed: int) -> nn.Module:
    """Build a network for these samples; the same seed gives the same weights."""
    name, known = network.name, {**MODELS, **SEQUENCE_MODELS}
    if not is_user_function(name) and name not in known:
        raise ValueError(f"unknown network {name!r}{did_you_mean(name, known)}")
    make = load_function(name) if is_user_function(name) else known[name]
    data_options = {"classes": data.train.classes, **_describe_samples(data)}
    signature = inspect.signature(make)
    options = {
        key: value for key, value in data_options.items() if key in signature.parameters
    } | network.options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive_seed(seed, "weights"))
        try:
            signature.bind(**options)
            if name in known:
                check_types(make, network.options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"network {name}: {error}") from None
        net = make(**options)
    if not isinstance(net, nn.Module):
        raise ValueError(f"network {name}: expected an nn.Module, got {type(net).__name__}")
    return net

"""FedAvg as a plain loop in one process."""

import time

import numpy as np
import torch
from workload import (
    PER_ROUND,
    evaluate,
    load_workload,
    make_network,
    read_arguments,
    report,
    train,
)

started = time.perf_counter()
torch.set_num_threads(1)
args = read_arguments()
workload = load_workload(args.data)
net = make_network()
rng = np.random.default_rng(0)
seconds = []
for _ in range(args.rounds):
    begin = time.perf_counter()
    sent = {name: value.clone() for name, value in net.state_dict().items()}
    total = {name: torch.zeros_like(value) for name, value in sent.items()}
    for device in rng.choice(len(workload), PER_ROUND, replace=False):
        net.load_state_dict(sent)
        train(net, *workload.get_device(int(device)))
        for name, value in net.state_dict().items():
            total[name] += value / PER_ROUND
    net.load_state_dict(total)
    seconds.append(time.perf_counter() - begin)
accuracy = evaluate(net, workload)
report(seconds, [(time.perf_counter() - started, accuracy)], started)

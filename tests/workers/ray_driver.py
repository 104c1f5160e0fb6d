"""A script on a Ray cluster that prints the hashes of runs with and without a kill, and the nodes.

The tests run it in a separate process, because Ray reads its token on import.
"""

import json
import sys

import ray
from tests.waiting import wait_until
from tests.workers.worker_jobs import Train, build_context, initial_params, run_rounds, train

from pliant.workers.pool import RayWorkers, open_pool

JOBS = [Train(device, steps=1 + device % 3) for device in range(6)]


def train_and_name_node(net, shared, job):
    """Train and return the node too; like functions of user scripts, this is sent by value."""
    if job is None:
        raise LookupError("no job")
    return train(net, shared, job) | {"node": ray.get_runtime_context().get_node_id()}


def find_nodes(pool):
    """Run jobs until two nodes have taken part, as actors start at different times."""
    nodes = set()

    def has_both():
        nodes.update(result["node"] for result in pool.run(JOBS, initial_params()))
        return len(nodes) == 2

    wait_until(has_both, "a job on each node")
    return sorted(nodes)


def main(address, folder):
    report = {}
    with open_pool(RayWorkers(address=address), build_context, train_and_name_node) as pool:
        report["count"] = pool.count
        report["nodes"] = find_nodes(pool)
        report["hash"] = run_rounds(pool, JOBS)
        report["killed"] = run_rounds(pool, [*JOBS[:3], Train(3, 1, f"{folder}/flag"), *JOBS[4:]])
        try:
            pool.run([None], {})
        except LookupError as error:
            report["note"] = error.__notes__[0]
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])

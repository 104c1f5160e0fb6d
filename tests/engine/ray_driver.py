"""A script on a Ray cluster: prints the hash of a run, of one with a kill, and who took part.

The tests run it in a process of its own, because Ray reads its token when it is imported.
"""

import json
import sys
import time

import ray
from worker_jobs import Train, initial, rounds, train, world

from pliant.engine.workers import Cluster, opened

JOBS = [Train(device, steps=1 + device % 3) for device in range(6)]


def where(net, shared, job):
    """Train, and say on which node; this function is sent by value, as a user's script's are."""
    if job is None:
        raise LookupError("no job")
    return train(net, shared, job) | {"node": ray.get_runtime_context().get_node_id()}


def both_nodes(pool):
    """Run jobs until actors on two nodes have taken part: they do not start at the same moment."""
    end, nodes = time.monotonic() + 60.0, set()
    while len(nodes) < 2 and time.monotonic() < end:
        nodes |= {result["node"] for result in pool.run(JOBS, initial())}
    return sorted(nodes)


def main(address, folder):
    found = {}
    with opened(Cluster(address=address), world, where) as pool:
        found["count"] = pool.count
        found["nodes"] = both_nodes(pool)
        found["hash"] = rounds(pool, JOBS)
        found["killed"] = rounds(pool, [*JOBS[:3], Train(3, 1, f"{folder}/flag"), *JOBS[4:]])
        try:
            pool.run([None], {})
        except LookupError as error:
            found["note"] = error.__notes__[0]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

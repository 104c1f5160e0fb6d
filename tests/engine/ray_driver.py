"""A script on a Ray cluster: prints the hash of a run, of one with a kill, and who took part.

The tests run it in a process of its own, because Ray reads its token when it is imported.
"""

import json
import sys

import ray
from worker_jobs import Train, rounds, train, world

from pliant.engine.workers import Cluster, opened

JOBS = [Train(device, steps=1 + device % 3) for device in range(6)]


def where(net, shared, job):
    """Train, and say on which node; this function is sent by value, as a user's script's are."""
    if job is None:
        raise LookupError("no job")
    return train(net, shared, job) | {"node": ray.get_runtime_context().get_node_id()}


def main(address, folder):
    found = {}
    with opened(Cluster(address=address), world, where) as pool:
        found["count"] = pool.count
        found["hash"] = rounds(pool, JOBS)
        found["killed"] = rounds(pool, [*JOBS[:3], Train(3, 1, f"{folder}/flag"), *JOBS[4:]])
        results = pool.run(JOBS * 4, world().state_dict())
        found["nodes"] = sorted({result["node"] for result in results})
        try:
            pool.run([None], {})
        except LookupError as error:
            found["note"] = error.__notes__[0]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

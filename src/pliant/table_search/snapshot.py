"""The network from which short trainings start: trained once per stage and kept on disk."""

from pathlib import Path

from pliant.params import Params
from pliant.storage import atomic, checkpoint
from pliant.table_search.short_training import SearchContext, train_snapshot

SNAPSHOT_FILE = "snapshot.ckpt"
SNAPSHOT_PATTERN = "snapshot*.ckpt"  # one per stage


def load_or_train_snapshot(context: SearchContext, folder: Path | None, stage: float) -> Params:
    """Return the snapshot on disk if it is intact and belongs to this context, else a new one."""
    name = SNAPSHOT_FILE if stage == 1.0 else f"snapshot-{stage}.ckpt"
    path = None if folder is None else folder / name
    if path is not None and path.exists():
        try:
            params, context_digest = checkpoint.load(path)
        except checkpoint.CorruptCheckpoint:
            context_digest = None
        if context_digest == context.digest:
            return params
    params = train_snapshot(context, stage)
    if path is not None:
        atomic.write_bytes(path, checkpoint.to_bytes(params, context.digest))
    return params

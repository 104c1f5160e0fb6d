"""Train on token sequences and on signals, across devices whose speed changes."""

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch

import pliant as pl

LENGTH, WORDS = 24, 400


def load_text() -> pl.data.TrainTestData:
    """Tell from a few words of Python's own library which package they are from."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [  # one group per file
        (label, re.findall(r"[a-z]+", path.read_text("utf-8", "ignore").lower()))
        for label, package in enumerate(("asyncio", "email", "multiprocessing", "xml"))
        for path in sorted((library / package).rglob("*.py"))
    ]
    counts = Counter(word for _, words in texts for word in words)
    common = [word for word, _ in counts.most_common(WORDS)]
    numbers = {word: number for number, word in enumerate(common, 2)}  # 0: padding, 1: rare
    samples = [
        ([numbers.get(word, 1) for word in words[start : start + LENGTH]], label, group)
        for group, (label, words) in enumerate(texts)
        for start in range(0, min(len(words), 3000) - LENGTH, LENGTH)
    ]
    tokens, labels, groups = (torch.tensor(column) for column in zip(*samples, strict=True))
    is_test = torch.arange(len(labels)) % 5 == 0
    train, test = (
        pl.ImageDataset.from_tensors(
            tokens[part], labels[part], classes=4, groups=groups[part], name="words"
        )
        for part in (~is_test, is_test)
    )
    return pl.data.TrainTestData(train=train, test=test)


def load_signals() -> pl.data.TrainTestData:
    """Read the bundled digits column by column: 28 channels, 28 steps."""
    train, test = (
        pl.ImageDataset.from_tensors(images.pixels[:2000].squeeze(1), images.labels[:2000])
        for images in (pl.data.digits().train, pl.data.digits().test)
    )
    return pl.data.TrainTestData(train=train, test=test)


if __name__ == "__main__":  # experiments/sequences read the same data
    text_net = pl.models.text_transformer(4, vocabulary=WORDS + 2, length=LENGTH, width=32, depth=1)
    signal_net = pl.models.signal_cnn(10, channels=28, filters=(24, 32))
    fleet = pl.Fleet(size=20, speed=pl.ChangingTrace(low=0.25, high=1.0, per_round=2.0))
    settings = pl.RunSettings(per_round=5, rules=pl.RoundRules(late="partial"))
    runs = ((text_net, load_text(), pl.ByGroup()), (signal_net, load_signals(), pl.Iid()))
    for net, source, partition in runs:
        data = source.share(partition, devices=20)
        for record in pl.simulate(pl.Distreal(), net, data, fleet, rounds=3, settings=settings):
            print(f"{source.train.name}: {record.seconds:6.1f} s  {record.accuracy:.3f}")

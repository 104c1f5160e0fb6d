import msgspec
import pytest

from pliant.engine.ledger import RoundRecord, TaskRecord, sum_tasks, verify_records

replace = msgspec.structs.replace

# two seconds of a device with 10 MAC/s: two mini-batches and an interrupted third
PARTIAL = TaskRecord(
    round=0,
    device=3,
    outcome="partial",
    samples=16,
    steps=2,
    macs=18.0,
    useful=16.0,
    available=20.0,
    down=100,
    up=100,
    seconds=1.8,
    joules=2.0,
    loss=0.5,
    starts=(0.2, 1.0, 1.8),
    ends=(1.0, 1.8),
    rows=(4, 5, 4),
)
FINISHED = replace(
    PARTIAL,
    device=5,
    outcome="finished",
    macs=16.0,
    seconds=1.6,
    starts=(0.2, 1.0),
    ends=(1.0, 1.8),
    rows=(4, 4),
    loss=0.7,
)
LATE = replace(PARTIAL, device=8, outcome="late", samples=0, steps=0, useful=0.0, up=0, loss=None)
TASKS = [PARTIAL, FINISHED, LATE]
TOTAL = RoundRecord(
    round=0,
    seconds=2.0,
    tasks=3,
    merged=2,
    outcomes={"finished": 1, "late": 1, "partial": 1},
    samples=32,
    steps=4,
    macs=52.0,
    useful=32.0,
    available=60.0,
    down=300,
    up=200,
    busy=1.8 + 1.6 + 1.8,
    joules=6.0,
    loss=0.6,
)
RECORDS = [*TASKS, TOTAL]


def make_round(number, seconds):
    tasks = [replace(task, round=number) for task in TASKS]
    return [*tasks, replace(TOTAL, round=number, seconds=seconds)]


def test_a_round_is_the_sum_of_its_tasks():
    assert sum_tasks(0, 2.0, TASKS) == TOTAL
    assert TOTAL.utilisation == 32 / 60
    assert TOTAL.accuracy is None
    assert sum_tasks(1, 3.0, []).utilisation == 0.0


def test_correct_records_pass():
    assert verify_records([]) == 0
    assert verify_records(RECORDS) == 1
    assert verify_records([*RECORDS, *make_round(1, 4.0), sum_tasks(2, 4.0, [])]) == 3


@pytest.mark.parametrize(
    ("index", "field", "value"),
    [
        (0, "round", 1),
        (0, "device", 5),
        (0, "device", -2),
        (0, "outcome", "finished"),
        (2, "outcome", "dropped"),
        (2, "outcome", "partial"),
        (0, "samples", 15),
        (2, "samples", 1),
        (0, "steps", 1),
        (0, "macs", 17.9),
        (0, "macs", 21.0),
        (0, "useful", 15.0),
        (0, "useful", 19.0),
        (2, "useful", 1.0),
        (0, "available", 21.0),
        (0, "down", 99),
        (0, "up", 101),
        (0, "seconds", 1.7),
        (1, "seconds", 1.7),
        (0, "joules", 2.1),
        (0, "loss", 0.4),
        (0, "starts", (0.2, 1.1, 1.8)),
        (0, "starts", (0.2, 1.0)),
        (1, "starts", (0.1, 1.0)),
        (0, "ends", (1.0, 1.7)),
        (1, "ends", (1.0, 2.1)),
        (1, "ends", (1.0,)),
        (0, "rows", (4, 5)),
        (3, "round", 1),
        (3, "seconds", 1.7),
        (3, "seconds", -1.0),
        (3, "tasks", 2),
        (3, "merged", 3),
        (3, "outcomes", {"finished": 2, "late": 1}),
        (3, "samples", 31),
        (3, "steps", 5),
        (3, "macs", 52.001),
        (3, "useful", 31.0),
        (3, "available", 59.0),
        (3, "down", 301),
        (3, "up", 201),
        (3, "busy", 5.0),
        (3, "joules", 6.1),
        (3, "loss", None),
    ],
)
def test_altered_records_are_refused(index, field, value):
    records = list(RECORDS)
    records[index] = replace(records[index], **{field: value})
    with pytest.raises(ValueError, match="round"):
        verify_records(records)


def test_missing_duplicate_or_misplaced_records_are_refused():
    second = make_round(1, 4.0)
    for records in (
        [*TASKS],
        RECORDS[1:],
        [RECORDS[0], *RECORDS],
        [RECORDS[3], *RECORDS[:3]],
        [*RECORDS, RECORDS[3]],
        second,
        [*RECORDS, *make_round(2, 4.0)],
        [*RECORDS, *make_round(1, 1.9)],
        [*second, *RECORDS],
    ):
        with pytest.raises(ValueError, match="round"):
            verify_records(records)

import pytest

from pliant.engine.split_cost import estimate_split_cost
from pliant.nn.models import lenet
from pliant.split import AdaSplit, VanillaSplit


def estimate(method, classes, iterations, times=1):
    """Return the client and total TMACs and dense GB of 20 rounds, multiplied by `times`."""
    records = estimate_split_cost(
        method,
        lenet(classes),
        (3, 32, 32),
        clients=5,
        samples=32 * iterations,
        classes=classes,
        rounds=20,
    )
    exchanges = [record.exchange for record in records]
    client = times * sum(exchange.forward for exchange in exchanges) / 1e12
    server = times * sum(exchange.server for exchange in exchanges) / 1e12
    dense = times * sum(exchange.dense for exchange in exchanges) / 1e9
    return client, client + server, dense


# Chopra et al., AdaSplit: figures of the authors' notebooks, recomputed; 765 = 51 × 15 iterations
@pytest.mark.parametrize(
    ("kappa", "expected_total", "expected_dense"),
    [
        (0.3, 15.0107, 21.06),
        (0.45, 12.9479, 16.54),
        (0.6, 10.8852, 12.03),
        (0.75, 8.8224, 7.52),
        (0.9, 6.7597, 3.01),
    ],
)
def test_costs_of_mixed_noniid_for_each_kappa(kappa, expected_total, expected_dense):
    client, total, dense = estimate(AdaSplit(kappa=kappa), 5, 15, times=51)
    assert client == pytest.approx(5.384503, abs=5e-7)
    assert total == pytest.approx(expected_total, abs=5e-5)
    assert dense == pytest.approx(expected_dense, abs=5e-3)


def test_costs_of_split_learning_and_of_no_head():
    client, total, dense = estimate(VanillaSplit(), 5, 15, times=51)
    assert (round(client, 6), round(total, 6), round(dense, 2)) == (3.760128, 26.679528, 100.27)
    assert round(estimate(AdaSplit(head=False), 5, 15, times=51)[0], 6) == 3.760128


def test_costs_of_mixed_cifar():
    client, total, dense = estimate(VanillaSplit(), 10, 26, times=13)
    assert (round(client, 6), round(total, 6), round(dense, 2)) == (1.661338, 11.790522, 44.30)
    client, total, dense = estimate(AdaSplit(), 10, 26, times=13)
    assert (round(client, 6), round(total, 6), round(dense, 2)) == (2.379035, 4.81004, 5.32)


@pytest.mark.slow
def test_costs_with_the_authors_number_of_iterations():
    client, total, dense = estimate(AdaSplit(), 5, 765)
    assert (round(client, 6), round(total, 4), round(dense, 2)) == (5.384503, 10.8852, 12.03)

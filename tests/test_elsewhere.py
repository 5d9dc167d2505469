"""What trains or counts coverage is marked ``machine``, however it comes to it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.zoo import train as train_under_another_name
from elsewhere import Watch, hangs_on_the_machine
from spectra.spectrum_operators import most_misses


def one_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@functools.cache
def kept() -> nn.Module:
    model = nn.Linear(2, 1)
    one_step(model)
    return model


@pytest.fixture
def trained() -> nn.Module:
    return kept()


class Runs:
    def go(self) -> nn.Module:
        return kept()


def by_the_zoo() -> None:
    zoo.train(zoo.reference_vit(), zoo.digits(), steps=1)


def by_another_name() -> None:
    train_under_another_name(zoo.reference_vit(), zoo.digits(), steps=1)


def by_a_helper() -> None:
    assert kept() is not None


def by_a_method() -> None:
    assert Runs().go() is not None


def by_a_function_in_it() -> None:
    def inside() -> None:
        one_step(nn.Linear(2, 1))

    inside()


def by_counting() -> None:
    assert most_misses(40) < 40


def by_looking_only() -> None:
    data = zoo.digits()
    assert data.train.size > ca.trace(ca.MatrixOperator(torch.eye(3))).value


def item(function: Callable[..., Any], request: pytest.FixtureRequest) -> pytest.Function:
    return pytest.Function.from_parent(request.node.parent, name="test", callobj=function)


@pytest.mark.parametrize(
    "function",
    [by_the_zoo, by_another_name, by_a_helper, by_a_method, by_a_function_in_it, by_counting],
    ids=lambda f: f.__name__,
)
def test_what_trains_or_counts_hangs_on_the_machine(
    function: Callable[[], None], request: pytest.FixtureRequest
) -> None:
    assert hangs_on_the_machine(item(function, request))


def test_a_fixture_that_trains_is_seen(request: pytest.FixtureRequest) -> None:
    def uses(trained: nn.Module) -> None:
        assert trained is not None

    assert hangs_on_the_machine(item(uses, request))


def test_what_only_reads_data_does_not(request: pytest.FixtureRequest) -> None:
    assert not hangs_on_the_machine(item(by_looking_only, request))


def test_training_that_no_call_shows_asks_for_the_mark(request: pytest.FixtureRequest) -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer, hidden = torch.optim.SGD(model.parameters(), 0.1), "st" + "ep"
    watch = Watch()
    try:
        watch.item = item(by_looking_only, request)
        with pytest.warns(UserWarning, match="trains on the spot: mark it"):
            getattr(optimizer, hidden)()
        watch.item = item(by_looking_only, request)
        watch.item.add_marker("machine")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            getattr(optimizer, hidden)()
    finally:
        watch.handle.remove()

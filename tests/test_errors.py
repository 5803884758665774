"""The tree of exceptions, and what each is to code that was written for vLLM."""

from __future__ import annotations

import kvyard
import pytest

BASES: dict[type[kvyard.KVCacheError], tuple[type[Exception], ...]] = {
    kvyard.ConfigError: (kvyard.KVCacheError, ValueError, AssertionError),
    kvyard.PlanningError: (kvyard.ConfigError, NotImplementedError),
    kvyard.InsufficientMemoryError: (kvyard.ConfigError,),
    kvyard.InvalidArgumentError: (kvyard.KVCacheError, ValueError, AssertionError),
    kvyard.EventDecodeError: (kvyard.KVCacheError, ValueError),
    kvyard.OutOfBlocksError: (kvyard.KVCacheError, ValueError),
    kvyard.UnknownRequestError: (kvyard.KVCacheError, KeyError),
    kvyard.OwnershipError: (kvyard.KVCacheError, RuntimeError),
    kvyard.DoubleFreeError: (kvyard.OwnershipError,),
    kvyard.StaleBlockError: (kvyard.OwnershipError,),
    kvyard.ForeignBlockError: (kvyard.OwnershipError,),
    kvyard.NotOwnedError: (kvyard.OwnershipError,),
    kvyard.AlreadyTrackedError: (kvyard.OwnershipError, AssertionError),
    kvyard.HashConflictError: (kvyard.OwnershipError, AssertionError),
    kvyard.InvariantError: (kvyard.KVCacheError, AssertionError),
    kvyard.PoisonedError: (kvyard.KVCacheError,),
    kvyard.EndpointError: (kvyard.KVCacheError, OSError),
    kvyard.PublisherClosedError: (kvyard.KVCacheError, RuntimeError),
    kvyard.MissingDependencyError: (kvyard.KVCacheError, ImportError),
}


@pytest.mark.parametrize("error", BASES)
def test_bases(error: type[kvyard.KVCacheError]) -> None:
    assert error.__bases__ == BASES[error]


@pytest.mark.parametrize("error", BASES)
def test_message_is_shown_as_it_is(error: type[kvyard.KVCacheError]) -> None:
    assert str(error('request "r0" holds no blocks')) == 'request "r0" holds no blocks'


def test_the_tree_has_no_other_members() -> None:
    def below(error: type[Exception]) -> set[type[Exception]]:
        found = set(error.__subclasses__())
        return found.union(*map(below, found))

    assert {e for e in below(kvyard.KVCacheError) if e.__module__ == "kvyard.errors"} == set(BASES)

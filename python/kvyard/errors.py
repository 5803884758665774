"""The exceptions that kvyard raises, as one tree under `KVCacheError`.

"Not enough blocks" is no exception where a scheduler expects it: `KVCacheManager.allocate_slots`
answers None. What is raised here is misuse or bad configuration, and whatever raises one of these
has left the state as it was.

Each class is also the built-in exception that vLLM 0.25.1 raises in the same place, so that code
written for vLLM catches it: `ValueError`, `KeyError`, `RuntimeError`, and `AssertionError` where
vLLM asserts.
"""


class KVCacheError(Exception):
    """Base of every exception that kvyard raises."""


class ConfigError(KVCacheError, ValueError, AssertionError):
    """An argument of a constructor is wrong: sizes that do not divide, an unknown spec or hash."""


class PlanningError(ConfigError, NotImplementedError):
    """The caches of these layers cannot share one pool as they are."""


class InsufficientMemoryError(ConfigError):
    """The memory does not hold one request of the longest length.

    Attributes:
        needed_bytes: What it would take; 0 where there is no memory at all.
        available_bytes: What there is.
        estimated_max_model_len: The longest request in tokens that fits, 0 for none.
    """

    needed_bytes: int = 0
    available_bytes: int = 0
    estimated_max_model_len: int = 0


class InvalidArgumentError(KVCacheError, ValueError, AssertionError):
    """An argument of a call is wrong: a negative count, an unknown id, a mask of wrong length."""


class EventDecodeError(KVCacheError, ValueError):
    """A payload is no batch of KV events; the message says at which byte, and what is expected."""


class OutOfBlocksError(KVCacheError, ValueError):
    """More blocks were demanded of the pool than it has free."""


class UnknownRequestError(KVCacheError, KeyError):
    """No request of that name holds blocks in this manager."""

    def __str__(self) -> str:
        """The message itself; `KeyError` would show its repr."""
        return Exception.__str__(self)


class OwnershipError(KVCacheError, RuntimeError):
    """A block was used by somebody who does not hold it, or in a state that forbids it."""


class DoubleFreeError(OwnershipError):
    """More references to a block were given back than had been handed out."""


class StaleBlockError(OwnershipError):
    """A block was re-allocated or lost its key since the lookup that named it; look up again."""


class ForeignBlockError(OwnershipError):
    """A block belongs to another pool."""


class NotOwnedError(OwnershipError):
    """The caller holds no reference of the kind that the call needs."""


class AlreadyTrackedError(OwnershipError, AssertionError):
    """A request that already holds blocks was given a prefix hit, or was added twice."""


class HashConflictError(OwnershipError, AssertionError):
    """A block that already carries a full key would get another one."""


class InvariantError(KVCacheError, AssertionError):
    """An internal invariant does not hold: a fault of kvyard's. The manager refuses later calls.

    Attributes:
        report: Who holds what and the last operations, as JSON for `kvyard explain`; None for a
            pool by itself.
    """

    report: str | None = None


class PoisonedError(KVCacheError):
    """An internal invariant broke earlier; the manager refuses every later call."""


class EndpointError(KVCacheError, OSError):
    """A socket cannot be bound or connected to its endpoint: it is in use, or not allowed."""


class PublisherClosedError(KVCacheError, RuntimeError):
    """A publisher was used after it had been closed."""


class MissingDependencyError(KVCacheError, ImportError):
    """An optional package is absent; the message names the extra that installs it."""

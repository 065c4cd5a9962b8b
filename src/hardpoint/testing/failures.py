"""How a suite says that something breaks its contract: what, and what to do about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ContractFailure(AssertionError):
    """Something does not keep its contract."""

    def __init__(self, subject: str, what: str, fix: str) -> None:
        super().__init__(f"{subject}: {what}. Fix: {fix}")
        self.subject = subject
        self.what = what
        self.fix = fix


def require(condition: Any, subject: str, what: str, fix: str) -> None:
    """Raise ContractFailure unless the condition holds."""
    if not condition:
        raise ContractFailure(subject, what, fix)


def name_of(thing: Any) -> str:
    """A class, function or object in words."""
    kind = thing if isinstance(thing, type) or inspect.isroutine(thing) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def require_class(cls: Any, *bases: type) -> str:
    """Hold against the contract's base class and its abstract methods; the class in words."""
    names = " or ".join(name_of(base) for base in bases)
    require(isinstance(cls, type), repr(cls), "it is not a class", f"give a class that derives from {names}")
    subject = name_of(cls)
    require(
        not bases or issubclass(cls, bases), subject, f"it does not derive from {names}", "derive it from the contract"
    )
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    require(
        not missing, subject, f"it does not implement {', '.join(missing)}", "write these methods; see the contract"
    )
    return subject


def require_call(function: Callable[..., Any], subject: str, shape: str, *args: Any, **kwargs: Any) -> None:
    """Check that a function can be called as we call it, without calling it.

    shape  the signature to write, such as `record(self, scheduler_stats, ...)`
    """
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ContractFailure(
            subject, f"it cannot be called as the host calls it: {error}", f"write it as {shape}"
        ) from None
    except ValueError:
        return  # a built-in without a signature


def require_sync(owner: Any, subject: str, *names: str) -> None:
    """Check that methods are not coroutine functions: nothing would await them."""
    for name in names:
        method = getattr(owner, name, None)
        require(
            not inspect.iscoroutinefunction(method),
            subject,
            f"{name} is a coroutine function, and the host does not await it",
            f"write `def {name}` instead of `async def {name}`",
        )


@contextmanager
def explained(subject: str, doing: str, fix: str) -> Iterator[None]:
    """Turn what is raised inside into a ContractFailure chained to it."""
    try:
        yield
    except ContractFailure:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ContractFailure(subject, f"{doing} raises {text}", fix) from error

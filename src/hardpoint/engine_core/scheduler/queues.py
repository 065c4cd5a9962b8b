"""Requests that wait, in the order in which they are admitted."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator

from hardpoint.engine_core.request import Request
from hardpoint.errors import ConfigError


class RequestQueue(ABC):
    """Waiting requests. Iterates in order of admission."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a request that has arrived."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Put back a request that was taken out or preempted."""

    @abstractmethod
    def peek_request(self) -> Request:
        """The next request; IndexError when there is none."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Take out the next request; IndexError when there is none."""

    @abstractmethod
    def remove_requests(self, requests: Collection[Request]) -> None:
        """Take out requests wherever they are; those that are not here are ignored."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    def __bool__(self) -> bool:
        return len(self) > 0


class FCFSRequestQueue(RequestQueue):
    """First come, first served; what is put back goes to the front."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        """Queue at the end."""
        self._requests.append(request)

    def prepend_request(self, request: Request) -> None:
        """Queue at the front."""
        self._requests.appendleft(request)

    def peek_request(self) -> Request:
        """The request that waited longest."""
        return self._requests[0]

    def pop_request(self) -> Request:
        """Take out the request that waited longest."""
        return self._requests.popleft()

    def remove_requests(self, requests: Collection[Request]) -> None:
        """Take out requests in one pass."""
        gone = {id(request) for request in requests}
        self._requests = deque(request for request in self._requests if id(request) not in gone)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityRequestQueue(RequestQueue):
    """Lowest (priority, arrival time, id) first."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add_request(self, request: Request) -> None:
        """Queue by rank."""
        heapq.heappush(self._heap, request)

    def prepend_request(self, request: Request) -> None:
        """Queue by rank: a request that is put back has no other right."""
        heapq.heappush(self._heap, request)

    def peek_request(self) -> Request:
        """The request of the best rank."""
        return self._heap[0]

    def pop_request(self) -> Request:
        """Take out the request of the best rank."""
        return heapq.heappop(self._heap)

    def remove_requests(self, requests: Collection[Request]) -> None:
        """Take out requests and rebuild the heap."""
        gone = {id(request) for request in requests}
        self._heap = [request for request in self._heap if id(request) not in gone]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))


_QUEUES: dict[str, type[RequestQueue]] = {"fcfs": FCFSRequestQueue, "priority": PriorityRequestQueue}


def create_request_queue(policy: str) -> RequestQueue:
    """The queue of `--scheduling-policy`; ConfigError for an unknown one."""
    if policy not in _QUEUES:
        raise ConfigError(
            f"scheduling policy {policy!r} is not known", code="policy", fix=f"use one of {', '.join(_QUEUES)}"
        )
    return _QUEUES[policy]()

"""The `vllm:` metrics of this process as plain objects (`LLM.get_metrics()`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import prometheus_client
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

_PREFIX = "vllm:"
# Counters split by a position label are read as one list.
_VECTOR_LABEL = "position"


@dataclass
class Metric:
    """A metric's name, without suffixes, and its labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A value that goes up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations by bucket: upper bound as text -> cumulative count."""

    count: int
    sum: float
    buckets: dict[str, int]


def get_metrics_snapshot(registry: prometheus_client.CollectorRegistry | None = None) -> list[Metric]:
    """Every `vllm:` metric with its present value."""
    source = prometheus_client.REGISTRY if registry is None else registry
    found: list[Metric] = []
    for family in source.collect():
        if family.name.startswith(_PREFIX):
            found.extend(_read(family))
    return found


def _read(family: Family) -> Iterable[Metric]:
    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    if family.type == "gauge":
        return [Gauge(family.name, sample.labels, sample.value) for sample in samples]
    if family.type == "histogram":
        return _histograms(family.name, samples)
    if samples and _VECTOR_LABEL in samples[0].labels:
        return _vectors(family.name, samples)
    return [Counter(family.name, sample.labels, int(sample.value)) for sample in samples]


def _grouped(samples: Iterable[Sample], label: str) -> Iterable[tuple[dict[str, str], list[Sample]]]:
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        labels = {name: value for name, value in sample.labels.items() if name != label}
        groups.setdefault(tuple(labels.items()), []).append(sample)
    return [(dict(labels), group) for labels, group in groups.items()]


def _vectors(name: str, samples: list[Sample]) -> Iterable[Metric]:
    for labels, group in _grouped(samples, _VECTOR_LABEL):
        values = [0] * (1 + max(int(sample.labels[_VECTOR_LABEL]) for sample in group))
        for sample in group:
            values[int(sample.labels[_VECTOR_LABEL])] = int(sample.value)
        yield Vector(name, labels, values)


def _histograms(name: str, samples: list[Sample]) -> Iterable[Metric]:
    for labels, group in _grouped(samples, "le"):
        by_name = {sample.name: sample.value for sample in group}
        buckets = {s.labels["le"]: int(s.value) for s in group if s.name.endswith("_bucket")}
        yield Histogram(name, labels, int(by_name.get(f"{name}_count", 0)), by_name.get(f"{name}_sum", 0.0), buckets)

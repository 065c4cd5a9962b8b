"""The process's Prometheus registry: engine metrics of every live engine, web metrics, plugin events.

Each engine's metrics live in a registry of their own, so that a second engine in the process (a
notebook, a test) starts from zero and its metrics go when it goes. The process registry shows
them through one collector, merged where two engines carry the same labels.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import prometheus_client
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from hardpoint.extensions.ledger import ledger

CONTENT_TYPE = CONTENT_TYPE_LATEST
_Labels = tuple[str, str, str]
_lock = threading.Lock()
_instruments: dict[str, Any] = {}


class _EngineMetrics:
    """Shows the metrics of all live engines of this process."""

    def __init__(self) -> None:
        # Weak: an engine that is dropped without a shutdown takes its metrics along.
        self._registries: list[weakref.ref[CollectorRegistry]] = []
        self._registered = False

    def add(self, registry: CollectorRegistry) -> None:
        with _lock:
            self._registries.append(weakref.ref(registry))
            if not self._registered:
                self._registered = True
                REGISTRY.register(self)

    def remove(self, registry: CollectorRegistry) -> None:
        with _lock:
            self._registries = [ref for ref in self._registries if ref() not in (None, registry)]

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        with _lock:
            registries = [registry for ref in self._registries if (registry := ref()) is not None]
        return merged([metric for registry in registries for metric in registry.collect()])


engine_metrics = _EngineMetrics()


def merged(metrics: Iterable[Metric]) -> list[Metric]:
    """One family per name; counts with equal labels add up, of gauges the last one stays."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], Any]] = {}
    for metric in metrics:
        family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit))
        samples = values.setdefault(family.name, {})
        for sample in metric.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            known = samples.get(key)
            if known is not None and metric.type != "gauge":
                earlier = sample.name.endswith("_created")
                value = min(known.value, sample.value) if earlier else known.value + sample.value
                sample = sample._replace(value=value)
            samples[key] = sample
    for name, family in families.items():
        family.samples = list(values[name].values())
    return list(families.values())


class _PluginMetrics:
    """`hardpoint:plugin_*`: what the ledger holds, of all processes that it has heard of."""

    _LABELS = ("key", "name", "role")
    _COUNTED = {"load": "loads", "call": "calls", "fault": "faults", "skip": "skips", "replace": "replacements"}
    _TIMED = {"load": "importing", "call": "calling"}

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        counts: dict[str, dict[_Labels, int]] = {kind: {} for kind in self._COUNTED}
        seconds: dict[str, dict[_Labels, float]] = {kind: {} for kind in self._TIMED}
        for entry in ledger.entries():
            labels = (entry.key, entry.name, entry.role)
            if entry.kind in counts:
                counts[entry.kind][labels] = counts[entry.kind].get(labels, 0) + 1
            if entry.kind in seconds:
                spent = seconds[entry.kind].get(labels, 0.0) + (entry.duration_s or 0.0)
                seconds[entry.kind][labels] = spent
        for kind, what in self._COUNTED.items():
            about = f"Extension {what} by process role"
            counter = CounterMetricFamily(f"hardpoint:plugin_{what}", about, labels=self._LABELS)
            for labels, count in counts[kind].items():
                counter.add_metric(list(labels), count)
            yield counter
        for kind, doing in self._TIMED.items():
            about = f"Seconds spent {doing} extensions, by process role"
            gauge = GaugeMetricFamily(f"hardpoint:plugin_{kind}_seconds", about, labels=self._LABELS)
            for labels, total in seconds[kind].items():
                gauge.add_metric(list(labels), total)
            yield gauge


def show_plugin_metrics() -> None:
    """Add `hardpoint:plugin_*` to the process registry, once."""
    with _lock:
        if "plugins" not in _instruments:
            collector = _PluginMetrics()
            REGISTRY.register(collector)
            _instruments["plugins"] = collector


def instrument(name: str, make: Callable[[], Any]) -> Any:
    """The process's one instrument of this name, made at its first use.

    One that somebody else registered under the name (a plugin, another server in the process) is
    taken over.
    """
    with _lock:
        if name not in _instruments:
            try:
                _instruments[name] = make()
            except ValueError:
                _instruments[name] = REGISTRY._names_to_collectors[name]
        return _instruments[name]


def exposition() -> bytes:
    """Everything in Prometheus' text format.

    With PROMETHEUS_MULTIPROC_DIR set, the figures of all processes that write there.
    """
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        # Made of the ledger, which holds all processes itself.
        registry.register(_PluginMetrics())
        return generate_latest(registry)
    show_plugin_metrics()
    return generate_latest(prometheus_client.REGISTRY)

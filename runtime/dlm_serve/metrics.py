"""Defines the Prometheus metrics of the server, which the path ``/metrics`` returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlm_serve.hosting import Model

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """All metrics of one server.

    Args:
        models: The models of the server.
        paths: The paths with their own time series. All other paths share one time series, so that
            clients cannot create new time series.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, models: Iterable[Model], paths: Collection[str]) -> None:
        self._registry, self._paths = CollectorRegistry(), paths
        self._requests = Counter(
            "dlm_requests",
            "Requests by path, model and status.",
            ["path", "model", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "dlm_request_seconds",
            "Seconds from a request to the end of its response.",
            ["path", "model"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._first_text = Histogram(
            "dlm_first_text_seconds",
            "Seconds from a request for a stream to the first text of its answer.",
            ["path", "model"],
            buckets=SECONDS,
            registry=self._registry,
        )
        names = {
            "prompt_tokens": "Tokens of prompts.",
            "completion_tokens": "Tokens of answers.",
            "denoising_passes": "Denoiser passes that requests took part in.",
        }
        self._counts = [
            Counter(f"dlm_{name}", said, ["path", "model"], registry=self._registry)
            for name, said in names.items()
        ]
        self._registry.register(_Schedulers(models))

    def request(self, path: str, model: str, status: int, seconds: float) -> None:
        """Count a request. ``model`` is the name of a model, or "" if the request reached none."""
        path = path if path in self._paths else "other"
        self._requests.labels(path, model, str(status)).inc()
        self._seconds.labels(path, model).observe(seconds)

    def first_text(self, path: str, model: str, seconds: float) -> None:
        self._first_text.labels(path, model).observe(seconds)

    def tokens(self, path: str, model: str, prompt: int, completion: int, passes: int) -> None:
        for counter, value in zip(self._counts, (prompt, completion, passes), strict=True):
            counter.labels(path, model).inc(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Schedulers(Collector):
    """Reads the counters of all schedulers when Prometheus asks for the metrics."""

    def __init__(self, models: Iterable[Model]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        gauges = {"running": "Requests in passes.", "waiting": "Requests that wait."}
        counters = {"passes": "Denoiser passes.", "busy_s": "Seconds in passes and commits."}
        found: dict[str, Metric] = {
            name: GaugeMetricFamily(f"dlm_scheduler_{name}", said, labels=["model"])
            for name, said in gauges.items()
        }
        found |= {
            name: CounterMetricFamily(
                f"dlm_scheduler_{name.replace('_s', '_seconds')}", said, labels=["model"]
            )
            for name, said in counters.items()
        }
        for model in self._models:
            stats = model.scheduler.stats
            for name, family in found.items():
                family.add_metric([model.name], getattr(stats, name))  # type: ignore[attr-defined]
        yield from found.values()

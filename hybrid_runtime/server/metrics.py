"""The counters of `/metrics`, in Prometheus' text form."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hybrid_runtime.engine import Completion, Engine

PREFIX = "hybrid_runtime"
_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics(Collector):
    """Counters of the server and, read when they are asked for, of the engine, all with the label
    `model_name`."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._label = {"model_name": model_name}
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        self.http = self._counter(
            "http_requests", "Answers, by path and status (499: the client left)", "path", "status"
        )
        self.http_open = Gauge(
            "http_requests_open", "Requests that are being answered", namespace=PREFIX,
            registry=self.registry,
        )  # fmt: skip
        self.ended = self._counter("completions", "Completions by why they ended", "finish_reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of completed prompts")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From a prompt's submission to its first token", _TTFT
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds",
            "Between tokens; those of one step share its time",
            _ITL,
        )
        self.seconds = self._histogram(
            "http_request_seconds", "From a request's arrival to the end of its answer", _SECONDS
        )

    def completed(self, completion: Completion) -> None:
        """Count a completion that has ended."""
        self.prompt_tokens.inc(completion.prompt_tokens)
        if completion.tokens:
            self.ttft.observe(completion.time_to_first_token)
        for seconds in completion.itl:
            self.itl.observe(seconds)

    def text(self) -> bytes:
        """All counters in Prometheus' text form."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        for family in self.registry.collect():
            family.samples = [s._replace(labels=self._label | s.labels) for s in family.samples]
            yield family

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, namespace=PREFIX, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, namespace=PREFIX, buckets=buckets, registry=self.registry)


class EngineCollector(Collector):
    """Reads an engine's counters. Its thread may be in the middle of a step: each counter is then
    from before it or from after it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        stats, counts, scheduler = engine.stats(), engine.core.counts, engine.scheduler
        yield _gauge("requests_waiting", "Requests in the queue", len(scheduler.waiting))
        yield _gauge("requests_running", "Requests in slots", len(scheduler.running))
        yield from self._blocks()
        prefix, state = stats.prefix, stats.state
        for name, help, value in (
            ("generation_tokens", "Tokens generated", counts.emitted),
            ("steps", "Steps whose results were read", counts.steps),
            ("drafted_rows", "Rows of steps that had drafts", counts.draft_steps),
            ("drafted_row_tokens", "Tokens that such rows emitted", counts.draft_emitted),
            ("preemptions", "Requests that had to give their blocks back", stats.preemptions),
            ("prefix_queried_tokens", "Tokens of admitted requests", prefix.queried_tokens),
            ("prefix_hit_tokens", "Those of them that need not run", prefix.hit_tokens),
            ("turn_ends", "Texts that can be gone on with where they ended", prefix.turn_ends),
            ("lost_turn_ends", "Those whose state was lost", prefix.lost_turn_ends),
            ("turn_hits", "Requests that went on where a text had ended", prefix.turn_hits),
            ("message_ends", "Checkpoints left where messages end", prefix.message_ends),
            ("message_hits", "Requests that went on at one of those", prefix.message_hits),
            ("evictions", "Cached blocks that made room for others", prefix.evictions),
            ("host_blocks", "Blocks that came from the host tier", prefix.host_blocks),
            ("state_steps", "Steps that the state manager has begun", state.steps),
            ("state_steps_skipped", "Those in which no state had to be saved", state.skipped),
            ("state_bytes_copied", "Bytes of states saved or moved", state.bytes_copied),
            ("waits", "Times the host waited for the device", state.waits),
            ("wait_seconds", "How long it waited in all", state.wait_seconds),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}", help, value=value)
        short = CounterMetricFamily(
            f"{PREFIX}_prefix_short_hits", "Prefix hits by why they were not longer",
            labels=["reason"],
        )  # fmt: skip
        for reason, count in dict(prefix.short).items():
            short.add_metric([reason], count)
        yield short
        yield _gauge(
            "acceptance_length", "Mean tokens per drafted row", stats.mean_acceptance_length
        )
        yield _gauge("drafts", "Drafts of a row now, in the mean", stats.drafts.chosen.mean)
        yield _gauge("most_drafts", "Most drafts of a row now", stats.drafts.chosen.most)
        yield _gauge(
            "expected_acceptance_length", "Tokens that a row with so many should get",
            stats.drafts.expected,
        )  # fmt: skip
        survival = GaugeMetricFamily(
            f"{PREFIX}_draft_survival", "How often a draft and all before it are accepted lately",
            labels=["position"],
        )  # fmt: skip
        for position, rate in enumerate(stats.drafts.survival, 1):
            survival.add_metric([str(position)], rate)
        yield survival

    def _blocks(self) -> Iterator[Metric]:
        """Blocks of both pools: all, those of requests, and those found by content."""
        scheduler = self._engine.scheduler
        pools = {"kv": scheduler.kv.pool, "state": scheduler.state.pool}
        for name, help, values in (
            ("blocks", "Blocks", {k: p.size for k, p in pools.items()}),
            ("blocks_used", "Owned by requests", {k: p.size - p.free for k, p in pools.items()}),
            ("blocks_cached", "Found by content", {k: p.cached for k, p in pools.items()}),
        ):
            family = GaugeMetricFamily(f"{PREFIX}_{name}", help, labels=["pool"])
            for pool, value in values.items():
                family.add_metric([pool], value)
            yield family


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", help, value=value)

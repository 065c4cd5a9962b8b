"""From constraints to grammars, on threads that no step waits for, with a bounded memory of what was compiled."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hardpoint.contracts.structured_output import (
    GrammarError,
    MalformedConstraint,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from hardpoint.engine_core.structured.backends import Backends, plugin_ref, usable_backends
from hardpoint.engine_core.structured.compilers import CompilerPool
from hardpoint.engine_core.structured.constraint import PLAIN, Constraint
from hardpoint.engine_core.structured.trial import compile_with
from hardpoint.engine_core.structured.vocabulary import read_vocabulary
from hardpoint.env import envs
from hardpoint.extensions.ledger import ledger
from hardpoint.log import init_logger
from hardpoint.types.messages import GrammarJob

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

logger = init_logger(__name__)
_KEY = "structured_output_backends"
_MIB = 1 << 20
# What a grammar without a dump weighs, for each byte of its text.
_BYTES_PER_TEXT_BYTE = 64
_LEAST_BYTES = 16 << 10
_MOST_PROCESSES = 8


class Compiled:
    """A grammar and the backend that made it."""

    __slots__ = ("backend", "grammar")

    def __init__(self, backend: str, grammar: StructuredOutputGrammar) -> None:
        self.backend = backend
        self.grammar = grammar


class GrammarMemory:
    """Compiled grammars, the least recently used of which go first. Use from any thread.

    limit_bytes  what all of them may weigh together, by estimate
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._weight = 0
        self._held: OrderedDict[Constraint, tuple[Compiled, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, constraint: Constraint) -> Compiled | None:
        """A grammar of its own for the constraint, or None."""
        with self._lock:
            held = self._held.get(constraint)
            if held is None:
                return None
            self._held.move_to_end(constraint)
            # Under the lock: two threads must not copy one grammar at a time.
            grammar = held[0].grammar.fork()
        return None if grammar is None else Compiled(held[0].backend, grammar)

    def put(self, constraint: Constraint, compiled: Compiled, weight: int) -> None:
        """Remember a grammar that nobody else uses."""
        with self._lock:
            old = self._held.pop(constraint, None)
            self._weight += weight - (old[1] if old is not None else 0)
            self._held[constraint] = compiled, weight
            while self._weight > self._limit_bytes and self._held:
                _, (_, freed) = self._held.popitem(last=False)
                self._weight -= freed

    def __len__(self) -> int:
        return len(self._held)


class GrammarCompiler:
    """Compiles with the backend of the configuration, or with the first of ours that can.

    Raises ConfigError for a backend that is not known or lacks its package.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._config = vllm_config.structured_outputs_config
        self._names = usable_backends(self._config.backend)
        count = max(2, min(_MOST_PROCESSES, ((os.cpu_count() or 1) + 1) // 2))
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="grammar")
        self._processes = count
        self._memory = GrammarMemory(envs.VLLM_XGRAMMAR_CACHE_MB * _MIB)
        self._parts: tuple[Backends, CompilerPool] | None = None
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def start(self, constraint: Constraint) -> Future[Compiled]:
        """Have a constraint compiled. The future raises GrammarError when it cannot be kept."""
        return self._threads.submit(self._compile, constraint)

    def recall(self, constraint: Constraint) -> Compiled | None:
        """A grammar of a constraint that was compiled before, or None."""
        return self._memory.get(constraint)

    def allocate_bitmask(self, backend: str, num_rows: int) -> Any:
        """Rows for the masks of a backend that has compiled something."""
        assert self._parts is not None
        return self._parts[0].get(backend).allocate_token_bitmask(num_rows)

    def token_of(self, piece: bytes) -> int | None:
        """The token of a piece of text; None when there is none. Once something has been compiled."""
        assert self._parts is not None
        return self._parts[0].tokenizer.token_of(piece)

    def _ready(self) -> tuple[Backends, CompilerPool]:
        with self._lock:
            if self._parts is None:
                vocabulary = read_vocabulary(self._vllm_config.model_config)
                pool = CompilerPool(self._vllm_config, vocabulary.table, self._processes)
                self._parts = Backends(self._vllm_config, vocabulary), pool
            return self._parts

    def _compile(self, constraint: Constraint) -> Compiled:
        # Whoever asked for the same at the same time may have it by now.
        remembered = self._memory.get(constraint)
        if remembered is not None:
            return remembered
        reasons: dict[str, str] = {}
        for name in self._names:
            try:
                compiled, weight = self._compile_with(name, constraint)
            except MalformedConstraint as error:
                raise GrammarError(_refusal(constraint.kind, {name: str(error)})) from None
            except GrammarError as error:
                reasons[name] = str(error)
                continue
            self._tell(name, constraint.kind, reasons)
            template = compiled.grammar.fork()
            if template is not None:
                self._memory.put(constraint, Compiled(name, template), weight)
            return compiled
        raise GrammarError(_refusal(constraint.kind, reasons))

    def _compile_with(self, name: str, constraint: Constraint) -> tuple[Compiled, int]:
        backends, pool = self._ready()
        dump = pool.run(_job(name, constraint), self._limit_s, self._config.max_compile_memory_mb)
        backend, stops = backends.get(name), list(constraint.stop_token_ids)
        if dump is not None:
            grammar = backend.load_grammar(dump, stops)
        else:
            style = None if constraint.style == PLAIN else constraint.style
            grammar = compile_with(backend, constraint.kind, constraint.spec, stops, style)
        size = len(dump) if dump is not None else len(constraint.spec) * _BYTES_PER_TEXT_BYTE
        return Compiled(name, grammar), max(_LEAST_BYTES, size)

    @property
    def _limit_s(self) -> float:
        return self._config.compile_timeout_s or envs.VLLM_REGEX_COMPILATION_TIMEOUT_S

    def _tell(self, name: str, kind: StructuredOutputOptions, reasons: dict[str, str]) -> None:
        """Say once per kind which backend keeps it."""
        with self._lock:
            if (name, kind.name) in self._told:
                return
            self._told.add((name, kind.name))
        passed = "".join(f"; {other} did not take it: {reason}" for other, reason in reasons.items())
        logger.info("structured outputs of kind %s are kept by %s%s", kind.name.lower(), name, passed[:500])
        detail = f"{kind.name.lower()} is kept by {name}{passed}"
        for entry in {name, self._config.backend}:
            ledger.record("call", _KEY, entry, detail=detail)

    def shutdown(self) -> None:
        """End all processes; what is still compiling fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._parts is not None:
            self._parts[1].shutdown()
            self._parts[0].destroy()


def _job(name: str, constraint: Constraint) -> GrammarJob:
    return GrammarJob(
        backend=name,
        kind=constraint.kind.name,
        spec=constraint.spec,
        stop_token_ids=list(constraint.stop_token_ids),
        style=constraint.style_fields,
        ref=plugin_ref(name),
    )


def _refusal(kind: StructuredOutputOptions, reasons: dict[str, str]) -> str:
    what = kind.name.lower().replace("_", " ")
    if not reasons:
        return "no structured output backend is installed"
    distinct = dict.fromkeys(reasons.values())
    if len(distinct) == 1:
        return f"the {what} constraint cannot be kept: {next(iter(distinct))}"
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return f"the {what} constraint cannot be kept by any backend: {told}"

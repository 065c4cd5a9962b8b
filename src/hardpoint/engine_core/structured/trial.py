"""The work of a grammar compiler process: one constraint after the other, with an answer to each."""

from __future__ import annotations

import re

import numpy as np

from hardpoint.contracts.structured_output import (
    GrammarError,
    JsonStyle,
    MalformedConstraint,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from hardpoint.engine_core.structured.backends import Backends, backend_class
from hardpoint.types.messages import GrammarJob, GrammarVerdict

READY, DONE, REFUSED, MALFORMED, FAILED = "ready", "done", "refused", "malformed", "failed"


def compile_with(
    backend: StructuredOutputBackend,
    kind: StructuredOutputOptions,
    spec: str,
    stop_token_ids: list[int],
    style: JsonStyle | None,
) -> StructuredOutputGrammar:
    """Compile a constraint; GrammarError when it cannot be kept, or no text could keep it."""
    reason = backend.why_unsupported(kind, spec)
    if reason is not None:
        raise GrammarError(reason)
    if style is None:
        grammar = backend.compile_grammar(kind, spec, stop_token_ids)
    else:
        grammar = backend.compile_styled(kind, spec, stop_token_ids, style)
    row = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(row, 0)
    if not np.asarray(row)[0].any():
        raise GrammarError("no text can satisfy it")
    return grammar


# What libraries put around their messages: time and place in their source, lines, marks.
_PLACE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: |<non-verbose/>")
_LONGEST_REASON = 500


def _tidy(text: str) -> str:
    return " ".join(_PLACE.sub("", text).split())[:_LONGEST_REASON]


def try_job(backends: Backends, job: GrammarJob) -> GrammarVerdict:
    """Compile a job's constraint with a backend that is loaded already."""
    style = None if job.style is None else JsonStyle(**job.style)
    try:
        backend = backends.get(job.backend)
        grammar = compile_with(backend, StructuredOutputOptions[job.kind], job.spec, job.stop_token_ids, style)
        return GrammarVerdict(DONE, dump=backend.dump_grammar(grammar))
    except MalformedConstraint as error:
        return GrammarVerdict(MALFORMED, _tidy(str(error)))
    except MemoryError:
        return GrammarVerdict(REFUSED, "it takes more memory than there is")
    except RecursionError:
        return GrammarVerdict(REFUSED, "it is nested too deeply")
    # Libraries raise whatever they like for a constraint they cannot take, some past Exception (Rust's panics).
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        text = _tidy(str(error)) or type(error).__name__
        told = isinstance(error, GrammarError | RuntimeError | ValueError)
        return GrammarVerdict(REFUSED, text if told else f"{type(error).__name__}: {text}")


def load_backend(backends: Backends, job: GrammarJob) -> GrammarVerdict:
    """Make a job's backend, before the time of the constraint begins to count; not for one that is refused anyway."""
    try:
        reason = backend_class(job.backend).why_unsupported(StructuredOutputOptions[job.kind], job.spec)
        if reason is not None:
            return GrammarVerdict(REFUSED, _tidy(reason))
        backends.get(job.backend).prepare()
    except Exception as error:
        return GrammarVerdict(FAILED, f"the backend {job.backend!r} cannot be used: {error}")
    return GrammarVerdict(READY)

"""The inspector: imports one model class, reports what it declares, and ends."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from hardpoint.contracts.model import inspect_model_class
from hardpoint.errors import ConfigError
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.links.children import ParentLink
from hardpoint.links.codec import Decoder
from hardpoint.processes.child import run_child
from hardpoint.types.messages import Inspect, Inspected

_requests = Decoder(Inspect)


class _Remarks(logging.Handler):
    """Keeps warnings about the class: this process's output is not where a user looks for them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _inspect(link: ParentLink) -> int:
    ref = _requests.decode(link.channel.receive()).ref
    remarks = _Remarks()
    logging.getLogger("hardpoint").addHandler(remarks)
    found = load_ref(ref)
    if not isinstance(found, type):
        raise ConfigError(f"{ref!r} is not a class", code="model-class", fix="register a model as <module>:<class>")
    link.send(Inspected(inspect_model_class(found).to_dict(), remarks.texts, ledger.export()))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect one class; return the exit status."""
    return run_child(sys.argv[1:] if argv is None else argv, Role.INSPECTOR, "inspector", _inspect)


if __name__ == "__main__":
    sys.exit(main())

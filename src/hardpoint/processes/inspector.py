"""The inspector: imports one model class, reports what it is and declares, and ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from hardpoint.contracts import model as contract
from hardpoint.errors import ConfigError
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.extensions.sources import digests, files_behind
from hardpoint.links.children import ParentLink
from hardpoint.links.codec import Decoder
from hardpoint.processes.child import end_process, run_child
from hardpoint.types.messages import Inspect, Inspected

_requests = Decoder(Inspect)


def _inspect(link: ParentLink) -> int:
    ref = _requests.decode(link.channel.receive()).ref
    found = load_ref(ref)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            f"{ref!r} is not a class that derives from torch.nn.Module",
            code="model-class",
            fix="derive the class from torch.nn.Module, or register another",
        )
    known = contract.inspection_of(found)
    # What a class declares is read by that module, which may have changed as well.
    sources = digests([*files_behind(found), Path(contract.__file__)])
    sys.stdout.flush()
    link.send(Inspected(known.info.to_dict(), known.path, list(known.remarks), sources, ledger.export()))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect one class; return the exit status."""
    # Our output goes to a file; what was said before a crash must be in it.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return run_child(sys.argv[1:] if argv is None else argv, Role.INSPECTOR, "inspector", _inspect)


if __name__ == "__main__":
    end_process(main())

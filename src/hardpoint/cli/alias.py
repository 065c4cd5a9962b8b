"""`hardpoint alias`: let programs that are not ours say `import vllm`."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "install, remove or show the distribution that answers `import vllm` outside our processes"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser("alias", help=HELP, description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("install", help="put the alias into this environment; refused where a real vLLM is")
    actions.add_parser("remove", help="take the alias out of this environment")
    actions.add_parser("status", help="say what `import vllm` finds in this environment")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Do it; 0 on success."""
    from hardpoint.compat import distribution

    if args.action == "install":
        there = distribution.install()
        print(f"`import vllm` is now answered by Hardpoint (vllm {there.version} in {there.location})")
        return 0
    if args.action == "remove":
        print("removed" if distribution.remove() else "the alias was not installed")
        return 0
    found = distribution.installed()
    if found is None:
        print("no vllm is installed; inside Hardpoint's processes `import vllm` works all the same")
    elif found.is_ours:
        print(f"the alias is installed: vllm {found.version} in {found.location}")
    else:
        print(f"a real vLLM {found.version} is installed in {found.location}; it is left alone")
    return 0

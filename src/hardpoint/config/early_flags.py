"""The few flags of `serve` that must be in force before plugins load, and so before the other flags are known."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.config.arguments import FlexibleArgumentParser, add_flag
from hardpoint.config.flags import BY_DEST
from hardpoint.extensions.loading import set_policy
from hardpoint.extensions.plugin_config import deliver, offer_command_line

_EARLY = ("plugin_policy", "plugin_config")


def apply_early_flags(words: Sequence[str]) -> None:
    """Bring the plugin policy and the plugins' settings of a command line, or of its `--config`, into force.

    Flags that plugins will declare can be read from then on. Raises FlagError or PluginConfigError.
    """
    parser = FlexibleArgumentParser(prog="hardpoint serve", add_help=False)
    for dest in _EARLY:
        add_flag(parser, BY_DEST[dest])
    given, rest = parser.parse_known_args(list(words))
    if getattr(given, "plugin_policy", None):
        set_policy(given.plugin_policy)
    deliver(getattr(given, "plugin_config", None))
    offer_command_line(rest)

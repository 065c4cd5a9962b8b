"""The plugin's own settings: the key `afd_like` of `--additional-config`."""

from dataclasses import dataclass, fields

KEY = "afd_like"
ROLES = ("attention", "ffn")


@dataclass(frozen=True)
class Settings:
    """What a user may write under the key.

    role   which half this server would run
    peers  how many servers run the other half
    """

    role: str = "attention"
    peers: int = 1

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"additional_config.{KEY}.role is {self.role!r}: expected one of {', '.join(ROLES)}")
        if not isinstance(self.peers, int) or self.peers < 1:
            raise ValueError(f"additional_config.{KEY}.peers is {self.peers!r}: expected a number of servers")


def read(vllm_config) -> Settings | None:
    """The settings, None when the user did not write the key. Raises ValueError naming what is wrong."""
    given = (vllm_config.additional_config or {}).get(KEY)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"additional_config.{KEY} is {given!r}: expected an object")
    unknown = sorted(set(given) - {field.name for field in fields(Settings)})
    if unknown:
        raise ValueError(f"additional_config.{KEY} has no key {', '.join(unknown)}")
    return Settings(**given)

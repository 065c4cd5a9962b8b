"""A request hook: one object per server process, shown every request and every text of an answer."""

import json
import re

from hardpoint.contracts.request_hook import HookedRequest, RequestHook, RequestRefused, TextFilter

FORBIDDEN = "acme-forbidden"
_ADDRESS = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
# A text's end that may be the beginning of an address; longer ones than an address can be are none.
_MAY_GO_ON = re.compile(r"[\w.+@-]{1,254}$")


class HideAddresses(TextFilter):
    """Keeps back only the word that is still being written."""

    def __init__(self) -> None:
        self.kept = ""

    def feed(self, text: str) -> str:
        """The next piece."""
        text = self.kept + text
        open_end = _MAY_GO_ON.search(text)
        end = open_end.start() if open_end else len(text)
        self.kept = text[end:]
        return _ADDRESS.sub("[address]", text[:end])

    def finish(self) -> str:
        """The last word."""
        return _ADDRESS.sub("[address]", self.kept)


class AcmeRequestHook(RequestHook):
    """Looks at requests before the engine does, and at answers before clients do."""

    async def before_admission(self, request: HookedRequest) -> None:
        """Refuse what may not be asked."""
        if FORBIDDEN in json.dumps(request.body):
            raise RequestRefused(f"{FORBIDDEN} may not be asked here", status=403, kind="PermissionDenied")

    def text_filter(self, request: HookedRequest, choice: int, channel: str) -> TextFilter | None:
        """One filter for each text: they come in pieces, at the same time as others."""
        return HideAddresses()

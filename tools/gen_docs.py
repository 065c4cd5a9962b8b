"""Write the generated parts of the documentation, or check that they are up to date.

    python tools/gen_docs.py           write
    python tools/gen_docs.py --check   exit with status 1 if a page would change

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import contract_docs
import model_docs
import proofs

from hardpoint.compat.rows import Entry
from hardpoint.compat.table import MODULES
from hardpoint.config.flags import FRONT_END, Flag, reason
from hardpoint.config.flags import GROUPS as ENGINE_FLAGS
from hardpoint.env import ALWAYS_SO, UNREAD, VARIABLES
from hardpoint.extensions.builtins import BUILTIN_ENTRY_POINTS, BUILTINS
from hardpoint.extensions.ledger import KIND_MEANINGS
from hardpoint.extensions.points import CONFIG_HOOKS, GROUPS, PLATFORM_HOOKS, REGISTRIES
from hardpoint.extensions.rows import Fault, Role, Row, State

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- generated: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def name(row: Row) -> str:
    """A row's key, marked when it is planned."""
    return linked(row.key, f"`{row.key}`") + (" *(planned)*" if row.state is State.PLANNED else "")


def linked(key: str, text: str) -> str:
    """Text that leads to the page of an extension point, where there is one."""
    return f"[{text}]({key}.md)" if f"docs/extensions/{key}.md" in PAGES else text


def roles(value: Role) -> str:
    """Processes in words."""
    return "all" if value == Role.ALL else value.label.replace("_", " ").replace("+", ", ")


def fault(value: Fault) -> str:
    """A fault rule in words."""
    return "-" if value is Fault.NEVER else value.value


def code(text: str) -> str:
    """Text as code, or a dash."""
    return f"`{text}`" if text else "-"


def contract(ref: str) -> str:
    """A contract's class path as code, or a dash."""
    return code(ref.replace(":", "."))


def groups() -> str:
    """The table of entry-point groups."""
    header = (
        "group",
        "the entry point is",
        "then",
        "allowlist",
        "import fails",
        "call fails",
        "wrong object",
        "loaded in",
    )
    lines = []
    for row in GROUPS:
        kind = (row.value.name or "").lower() + (f" ({contract(row.contract)})" if row.contract else "")
        faults = [fault(rule) for rule in (row.import_fails, row.call_fails, row.wrong_type)]
        planned = " *(planned)*" if row.state is State.PLANNED else ""
        lines.append(
            [
                linked(row.key, f"`{row.group}`") + planned,
                kind,
                row.then.value,
                row.allow.value,
                *faults,
                roles(row.roles),
            ]
        )
    ours = [f"`{entry}` in `{group}`" for group, entries in BUILTIN_ENTRY_POINTS.items() for entry in entries]
    return table(header, lines) + f"\nOur own entries, treated like installed ones: {', '.join(ours)}.\n"


def registries() -> str:
    """The table of registries."""
    header = ("registry", "contract", "takes", "checked", "same name again", "chosen by", "read in", "built in")
    return table(
        header,
        [
            [
                name(row),
                contract(row.contract),
                " or ".join(sorted((part.name or "").lower() for part in row.takes)).replace("ref", "reference"),
                row.check.value,
                _duplicates(row.duplicate.value, row.strict_duplicate.value),
                row.chosen_by,
                roles(row.roles),
                ", ".join(f"`{entry}`" for entry in BUILTINS.get(row.key, {})) or "-",
            ]
            for row in REGISTRIES
        ],
    )


def _duplicates(rule: str, strict: str) -> str:
    return rule if rule == strict else f"{rule}; {strict} in the strict form"


def config_hooks() -> str:
    """The table of config hooks."""
    header = ("hook", "flag", "config field", "value", "contract", "read in")
    return table(
        header,
        [
            [
                name(row),
                code(row.flag),
                code(row.field),
                row.shape.value + (f", or `{'`, `'.join(row.words.split())}`" if row.words else ""),
                contract(row.contract),
                roles(row.roles),
            ]
            for row in CONFIG_HOOKS
        ],
    )


def platform_hooks() -> str:
    """The table of platform hooks."""
    header = ("method", "when", "how often", "called in")
    return table(header, [[name(row), row.moment, row.often, roles(row.roles)] for row in PLATFORM_HOOKS])


def proof_table() -> str:
    """The state of every row, and the test that shows it."""
    lines = [
        [kind, linked(row.key, f"`{row.key}`"), row.state.value, f"[{Path(test).name}](../../{test})"]
        for kind, row in proofs.rows()
        for test in [proofs.proof(row)]
    ]
    return table(("kind", "row", "state", "shown by"), lines)


def ledger() -> str:
    """The table of ledger events."""
    return table(("event", "means"), [[f"`{kind}`", meaning] for kind, meaning in KIND_MEANINGS.items()])


def supported_flags() -> str:
    """The flags that work, by section."""
    parts = []
    for section, flags in {**ENGINE_FLAGS, **FRONT_END}.items():
        lines = [
            [", ".join(f"`{name}`" for name in flag.names), _default(flag), flag.help + _values(flag)]
            for flag in flags
            if not flag.why
        ]
        if lines:
            parts.append(f"### {section}\n\n" + table(("flag", "default", "meaning"), lines))
    return "\n".join(parts)


def refused_flags() -> str:
    """The flags that are refused, with the reason."""
    flags = [flag for section in {**ENGINE_FLAGS, **FRONT_END}.values() for flag in section if flag.why]
    return table(("flag", "why"), [[f"`{flag.names[0]}`", reason(flag)] for flag in flags])


def _default(flag: Flag) -> str:
    return "-" if flag.default is None or flag.default == "" else f"`{flag.default}`"


def _values(flag: Flag) -> str:
    words = isinstance(flag.kind, tuple) and all(isinstance(value, str) for value in flag.kind)
    return f" ({', '.join(flag.kind)})" if words else ""


def environment() -> str:
    """The table of environment variables that are read."""
    return table(
        ("variable", "default", "meaning"),
        [
            [f"`{row.name}`", "-" if row.default in (None, "", ()) else f"`{row.default}`", row.help.replace("|", "or")]
            for row in VARIABLES
            if row.name not in UNREAD | ALWAYS_SO
        ],
    )


def environment_unread() -> str:
    """The variables of vLLM's that change nothing, and why."""
    return table(
        ("variable", "in vLLM", "here"),
        [
            [f"`{row.name}`", row.help.replace("|", "or"), "always so" if row.name in ALWAYS_SO else "a warning"]
            for row in VARIABLES
            if row.name in UNREAD | ALWAYS_SO
        ],
    )


def alias_modules() -> str:
    """The alias's modules and whose names show through."""
    lines = []
    for module, row in MODULES.items():
        if isinstance(row, Entry) and (row.home or row.names):
            homes = sorted({*row.home.split(), *(target.partition(":")[0] for target in row.names.values())})
            lines.append([f"`{module}`", ", ".join(f"`{home}`" for home in homes)])
    return table(("module", "answered by"), lines)


def alias_gaps() -> str:
    """What the alias does not answer yet."""
    lines = []
    for module, row in MODULES.items():
        if isinstance(row, Entry):
            lines += [[f"`{module}.{name}`", what] for name, what in row.waits.items()]
        else:
            lines.append([f"`{module}` and below", row.what])
    return table(("name", "waits for"), lines)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/extensions/index.md": {
        "groups": groups,
        "registries": registries,
        "config hooks": config_hooks,
        "platform hooks": platform_hooks,
        "proofs": proof_table,
        "ledger": ledger,
    },
    "docs/reference/flags.md": {"supported flags": supported_flags, "refused flags": refused_flags},
    "docs/reference/environment.md": {"environment": environment, "unread": environment_unread},
    "docs/models.md": {"models": partial(model_docs.supported, table)},
    "docs/compatibility.md": {"alias modules": alias_modules, "alias gaps": alias_gaps},
}
PAGES |= {
    f"docs/extensions/{row.key}.md": {
        "facts": partial(contract_docs.facts, row),
        "contract": partial(contract_docs.contract, row),
        "suite": partial(contract_docs.suites, row),
        "example": partial(contract_docs.example, row),
    }
    for row in contract_docs.paged_rows()
}


def render(text: str, parts: dict[str, Callable[[], str]]) -> str:
    """The page with its generated parts filled in; KeyError for a marker nobody fills."""
    return MARKED.sub(lambda found: found.group(1) + parts[found.group("name")]() + found.group(3), text)


def main(argv: list[str]) -> int:
    """Write or check every page; the exit status."""
    stale = []
    for page, parts in PAGES.items():
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        missing = set(parts) - {found.group("name") for found in MARKED.finditer(before)}
        if missing:
            print(f"{page} lacks the markers of: {', '.join(sorted(missing))}", file=sys.stderr)
            return 1
        after = render(before, parts)
        if after != before:
            stale.append(page)
            if "--check" not in argv:
                path.write_text(after, encoding="utf-8")
    if stale and "--check" in argv:
        print(f"not up to date: {', '.join(stale)}. Run: python tools/gen_docs.py", file=sys.stderr)
        return 1
    for page in stale:
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

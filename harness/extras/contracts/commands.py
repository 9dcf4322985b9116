"""`cohort check`."""

from typing import Annotated

import typer

from ...cli.commands import command
from ...cli.options import Json
from ...console import terminal


@command("check", "cohort check my-package")
def check(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="Installed package with plugins, as pip names it.")],
    as_json: Json = False,
) -> None:
    """Check the plugins of a package of your own against what Cohort's own are tested for.

    Prints one line per check, and what to change where one fails; the exit code is then 1. A check that ends its
    process or takes five minutes has failed. A task that reads files is checked on its default path.
    """
    from .plugins import check_package

    failed, found = 0, []
    for one in check_package(package):
        failed += bool(one.found)
        found.append(vars(one))
        if not as_json:
            terminal.say(f"{'FAIL' if one.found else 'PASS'} {one.kind} {one.name}: {one.rule}",
                         style="bold red" if one.found else "")  # fmt: skip
            if one.found:
                terminal.say(f"     found: {one.found}\n     fix: {one.fix}")
    if as_json:
        terminal.print_json({"package": package, "failed": failed, "checks": found})
    else:
        terminal.say(f"{len(found) - failed} of {len(found)} checks passed")
    if failed:
        raise typer.Exit(1)

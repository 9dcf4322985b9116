"""Draws a terminal as SVG from the output of commands that it runs; their progress (stderr) is left out."""

import io
import os
import subprocess
import sys

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 110
# Rich's own template loads a font from the network.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def main(out: str, *commands: str) -> None:
    """Run the commands and write the picture."""
    screen = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    for command in commands:
        screen.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        ran = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
        if ran.returncode:
            sys.exit(f"{command}: status {ran.returncode}\n{ran.stderr}")
        screen.print(Text.from_ansi(ran.stdout))
    screen.save_svg(out, title="cohort", theme=MONOKAI, code_format=SVG, unique_id="cohort")

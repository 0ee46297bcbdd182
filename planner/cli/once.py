"""A command whose options are given once each: a second value would silently replace the first."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand

from planner.errors import InvalidValueError


class OnceCommand(TyperCommand):
    """Refuses an option with a value that is given twice, unless it is repeatable."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line. InvalidValueError names the option that was given twice."""
        _, _, order = self.make_parser(ctx).parse_args(args=[*args])
        given = Counter(id(p) for p in order)
        for param in order:
            single = param.param_type_name == "option" and not param.multiple and not getattr(param, "is_flag", False)
            if single and given[id(param)] > 1:
                flag = max(param.opts, key=len)
                why = "it takes one value, and the last would replace the others"
                raise InvalidValueError(
                    f"{flag} is given {given[id(param)]} times", why, LISTED.get(flag, f"Give {flag} once.")
                )
        return super().parse_args(ctx, args)


LISTED = {"--on": "Write kinds of own machines in one: --on 2xrtx-4090,1xh100-sxm (a plan takes one of them)."}

"""Draws what the planner decided about each instance that memory held down, and why."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from protos.infinite_llm.v1 import gmanager_pb2


def draw_decisions(decisions: list[gmanager_pb2.Decision]) -> RenderableType:
    """As many as are given, in their order."""
    if not decisions:
        return Text("nothing was decided: no instance is held down by its memory", style="dim")
    return Group(*map(_draw, decisions))


def _draw(decision: gmanager_pb2.Decision) -> RenderableType:
    what = "moved" if decision.is_move else "not moved"
    request = f", request {decision.req_id:016x}" if decision.req_id else ""
    gain = f", {decision.gain_tokens_per_s:+.1f} tok/s" if decision.moves else ""
    since = f"{decision.last_age_s:.0f} s ago"
    if decision.times > 1:
        since += f", {decision.times} times since {decision.first_age_s:.0f} s ago"
    head = Text(f"instance {decision.debtor}: {what}, {decision.verdict}{request}{gain} ({since})")
    moves = [Text(f"  {_describe(move)}") for move in decision.moves]
    return Group(head, *moves, *([_draw_terms(decision)] if decision.changes else []))


def _describe(move: gmanager_pb2.DecidedMove) -> str:
    answer = f": {move.outcome}" if move.outcome else ""
    reason = f" ({move.reason})" if move.reason else ""
    return f"{move.num_blocks} blocks to instance {move.destination}{answer}{reason}"


def _draw_terms(decision: gmanager_pb2.Decision) -> Table:
    table = Table("  inst", box=None, pad_edge=False)
    for column in ("batch", "layers ms", "attention ms", "link ms", "tok/s"):
        table.add_column(column, justify="right")
    for change in decision.changes:
        before, after = change.before, change.after
        table.add_row(
            f"  {change.inst_id}",
            f"{before.batch} > {after.batch}",
            _in_ms(before.non_attention_s, after.non_attention_s),
            _in_ms(before.attention_s, after.attention_s),
            _in_ms(before.link_s, after.link_s),
            f"{before.tokens_per_s:.1f} > {after.tokens_per_s:.1f}",
        )
    return table


def _in_ms(before_s: float, after_s: float) -> str:
    return f"{before_s * 1e3:.2f} > {after_s * 1e3:.2f}"

"""Shows a running request: the map above, the answer below as it streams.

On a terminal both are redrawn in place. Elsewhere the map is printed once, when the answer
begins, and the answer after it piece by piece.
"""

from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from services.local.client import ChatRequest
from services.local.cluster import LocalCluster
from services.local.console import draw_map
from services.local.map_reader import ClusterView
from services.local.progress import Progress
from services.local.showcase import Audience, Outcome, run_prompt

_REFRESH_PER_S = 5


async def show_request(
    cluster: LocalCluster, request: ChatRequest, console: Console, progress: Progress
) -> Outcome:
    """Sends the request to the cluster's router and shows it until its end."""
    capacity = cluster.spec.instance_capacity_tokens
    progress.say(f"sending a long prompt; one instance holds {capacity} tokens")
    with Screen(console) as screen:
        outcome = await run_prompt(
            cluster.http_url, cluster.gmanager_address, request, screen.audience
        )
    progress.say(
        f"{outcome.prompt_tokens} tokens in, {outcome.completion_tokens} out at "
        f"{outcome.tokens_per_second:.1f} tokens/s; "
        f"at most {outcome.borrowed_blocks_peak} blocks were borrowed"
    )
    return outcome


class Screen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._view: ClusterView | None = None
        self._text = ""
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=_REFRESH_PER_S
        )

    @property
    def audience(self) -> Audience:
        return Audience(self._show_view, self._show_text)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._console.print()

    def _show_view(self, view: ClusterView) -> None:
        self._view = view

    def _show_text(self, piece: str) -> None:
        if not self._console.is_terminal:
            if not self._text and self._view is not None:
                self._console.print(draw_map(self._view))
            self._console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        self._text += piece

    def _render(self) -> RenderableType:
        if self._view is None:
            return Text("the prompt is on its way", style="dim")
        return Group(draw_map(self._view), Text(self._text))

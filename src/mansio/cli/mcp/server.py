"""The Model Context Protocol on standard input and output, with its SDK.

Source: https://modelcontextprotocol.io, revision 2025-11-25 and later ones that the SDK speaks.

Invariants:
* While it serves, descriptor 1 is standard error for everything but the SDK's transport.
* At most `CALLS_AT_ONCE_MAX` calls run; others wait.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Final

import mcp.types as protocol
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from mansio.cli.mcp.answers import answer_text
from mansio.cli.mcp.tools import AS_DATA, CHANGES, Toolbox
from mansio.version import __version__

if TYPE_CHECKING:
    from mcp.server import ServerRequestContext

CALLS_AT_ONCE_MAX: Final = 4
INSTRUCTIONS: Final = (
    "Questions about one cluster of the message queue Mansio, with the rights of one user. For a group that is slow or "
    "stuck start with `why`, for one record with `trace`. An answer has at most 4 KB: `left_out` counts the items that "
    "were left out, and `command` is a command line for a person that shows more or helps." + AS_DATA
)


def serve(bootstrap_servers: str, *, shows_values: bool, allows_changes: bool) -> None:
    """Serve until standard input ends. Ctrl-C and SIGTERM end the process at once: nothing has to be cleaned up, and
    a thread of the SDK waits for input, which would hold back an orderly end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    toolbox = Toolbox(bootstrap_servers, shows_values=shows_values, allows_changes=allows_changes)
    asyncio.run(_serve(toolbox))


async def _serve(toolbox: Toolbox) -> None:
    places = asyncio.Semaphore(CALLS_AT_ONCE_MAX)

    async def list_tools(
        _context: ServerRequestContext[Any], _params: protocol.PaginatedRequestParams | None
    ) -> protocol.ListToolsResult:
        return protocol.ListToolsResult(tools=_listed(toolbox))

    async def call_tool(
        _context: ServerRequestContext[Any], params: protocol.CallToolRequestParams
    ) -> protocol.CallToolResult:
        async with places:
            answer = await toolbox.call(params.name, params.arguments or {})
        content = protocol.TextContent(type="text", text=answer_text(answer.fields))
        return protocol.CallToolResult(content=[content], is_error=answer.is_error)

    server: Server[Any] = Server(
        "mansio",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())


def _listed(toolbox: Toolbox) -> list[protocol.Tool]:
    return [
        protocol.Tool(
            name=each.name,
            description=each.description,
            input_schema=each.schema(),
            annotations=protocol.ToolAnnotations(
                read_only_hint=each not in CHANGES,
                destructive_hint=False,
                idempotent_hint=True,
                open_world_hint=False,
            ),
        )
        for each in toolbox.tools
    ]

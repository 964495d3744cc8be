"""An MCP server with one tool, the prices that the questions in prices.jsonl ask for."""

from mcp.server.mcpserver import MCPServer

PRICES = {"lamp": 31, "chair": 64, "table": 128, "shelf": 77, "sofa": 412, "desk": 205}

server = MCPServer("prices")


@server.tool()
def price(item: str) -> str:
    """The price of an item, in dollars.

    Args:
        item: Such as lamp.
    """
    return str(PRICES.get(item.strip().lower(), "no such item"))


if __name__ == "__main__":
    server.run()

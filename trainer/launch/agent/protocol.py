"""The protocol between the controller, a rank's agent on another host, and the bootstrap process beside that agent.

Registration, over TCP, a line of JSON each; both ends prove that they hold the join token (join_token.py):

    agent:       {"rank": rank, "nonce": text, "port": the port that rank 0 reserved, else 0}
    controller:  {"nonce": text, "proof": of ("controller", rank, the agent's nonce, its own nonce)}
    agent:       {"proof": of ("agent", rank, the agent's nonce, the controller's nonce, port)}

Then, on the same connection, the controller sends lines: a heartbeat every HEARTBEAT_INTERVAL, and commands:

    {"start": [address, port]}   all ranks have registered: start this one; the ranks meet at that address
    stop                         send SIGTERM to the rank; sent again, once more
    stacks                       have the rank write the Python stacks of its threads to its log, and send them
    kill                         end the rank

The agent sends lines of JSON: the rank's own messages (rank/channel.py), its answers to heartbeats, LAUNCHER_DIED, STACKS, LOG_TAIL, and
last {"ended": exit status, or minus a signal}. An end that hears nothing for HEARTBEAT_TIMEOUT takes the other for dead or cut off.

The agent and its bootstrap send single bytes over a socket pair.
"""

from __future__ import annotations

import json

HEARTBEAT_INTERVAL = 1.0  # seconds
HEARTBEAT_TIMEOUT = 8.0  # seconds

# Lines of the controller
HEARTBEAT = b"heartbeat"
STOP = b"stop"
DUMP_STACKS = b"stacks"
KILL = b"kill"

# Kinds of the agent's messages
ALIVE = "alive"  # the answer to a heartbeat
LAUNCHER_DIED = "launcher_died"
STACKS = "stacks"
LOG_TAIL = "log_tail"
ENDED = "ended"

# Bytes between an agent and its bootstrap
AGENT_ALIVE, RANK_ENDED = b".", b"!"  # from the agent
BOOTSTRAP_STOP, BOOTSTRAP_ORPHANED = b"T", b"O"  # from the bootstrap: it received SIGTERM; its launcher has died


def start_command(address: str, port: int) -> bytes:
    """Return the controller's line that has an agent start its rank."""
    return json.dumps({"start": [address, port]}).encode()


def start_address(line: bytes) -> tuple[str, int] | None:
    """Return the address and port of a start command; None if the line is another command."""
    if not line.startswith(b'{"start"'):
        return None
    address, port = json.loads(line)["start"]
    return address, port

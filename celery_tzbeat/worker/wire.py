"""Bodies as they travelled: kombu decompresses a message as it comes, and over AMQP keeps nothing of what it was before.

A dead letter, and what the ledger rebuilds, are to be the message byte for byte; compressing anew may give other bytes
(another zlib, another level). So the messages of a worker's channel keep a compressed body beside the one that Celery reads.
kombu's virtual transports (Redis, SQS) keep the whole text themselves.

Seam: `pyamqp.Channel.Message`, by which the channel makes its messages; a contract test holds it. On a transport that has no
such class nothing is kept, and `outcome.raw_message` puts the decompressed body into the letter, without the header that says
otherwise: that runs as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kombu.transport import pyamqp

#: The attribute of a message that has the body as it travelled; there is none where the message's own is that.
TRAVELLED = "tzbeat_travelled"


def keep_bodies(channel: Any) -> None:
    """Have the messages that a channel of AMQP makes keep compressed bodies as they travelled; any other is left alone.

    To be called before it consumes; a second call changes nothing.
    """
    found = getattr(channel, "Message", None)
    if isinstance(found, type) and issubclass(found, pyamqp.Message) and not hasattr(found, TRAVELLED):
        channel.Message = _keeping(found)


@cache
def _keeping(base: type) -> type:
    def __init__(self: Any, msg: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, msg, *args, **kwargs)  # type: ignore[misc]
        if self.headers.get("compression"):
            setattr(self, TRAVELLED, msg.body)

    return type(base.__name__, (base,), {"__init__": __init__, "__module__": __name__, TRAVELLED: None})

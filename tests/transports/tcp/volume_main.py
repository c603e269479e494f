"""The program of a process with a server half of ``tcp``; see :mod:`tests.transports.tcp.apart`.

It obeys one line of JSON at a time: a name and arguments, bytes in hexadecimal.
"""

from __future__ import annotations

import asyncio
import json
import sys

from tests.transports.tcp.halves import Volume

from torchstore_core.errors import TransportError


async def main() -> None:
    volume = Volume(int(sys.argv[1]))
    await volume.start()
    print(volume.offer.hex(), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = json.loads(line)
        answer: object = None
        try:
            if name == "handshake":
                peer, request = map(bytes.fromhex, arguments)
                answer = (await volume.server.handshake(peer, request)).hex()
            elif name == "disconnect":
                await volume.server.disconnect(bytes.fromhex(arguments[0]))
            elif name == "read":
                answer = volume.memory[arguments[0] : arguments[0] + arguments[1]].hex()
            elif name == "write":
                data = bytes.fromhex(arguments[1])
                volume.memory[arguments[0] : arguments[0] + len(data)] = data
            else:
                raise ValueError(name)
        except TransportError as error:
            answer = {"code": error.code, "message": error.message}
        print(json.dumps(answer), flush=True)
    await volume.close()


asyncio.run(main())

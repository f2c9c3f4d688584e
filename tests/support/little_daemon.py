"""A process that supervises one busy fake engine: prints the engine's pid, then waits to be killed."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.engines import request, supervised, until


async def run(directory: Path) -> None:
    async with supervised(directory, step_delay=0.01) as supervisor:
        stream = supervisor.submit(request(1, 4000))
        await until(lambda: stream.output_ids)
        print(supervisor.pid, flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1])))

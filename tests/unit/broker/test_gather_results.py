"""Several writes at once: each has its own outcome, and nothing passes for done that was not."""

from __future__ import annotations

import asyncio

import pytest

from mansio.errors import CoordinatorNotAvailable, NotCoordinator
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.gather_results import gather_results


@pytest.mark.parametrize("broken", [asyncio.CancelledError, AssertionError, OSError])
def test_only_what_came_to_its_end_went_well(broken: type[BaseException]) -> None:
    async def well() -> None:
        await asyncio.sleep(0)

    async def refused() -> None:
        raise NotCoordinator("elsewhere")

    async def broken_off() -> None:
        await asyncio.sleep(0)
        raise broken

    async def main() -> None:
        scheduler = AsyncioScheduler(asyncio.get_running_loop())
        works = [well(), refused(), broken_off()]
        done, elsewhere, lost = await gather_results(scheduler, works, name="writes")
        assert done is None
        assert isinstance(elsewhere, NotCoordinator)
        assert isinstance(lost, CoordinatorNotAvailable)

    asyncio.run(main())

"""Any sequence of steps is answered alike by both ledgers; and whatever the sequence, what is done never starts again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from scenes import MOMENT, SHORT, Scene, scene_on

from celery_tzbeat.model import Policy
from celery_tzbeat.store.runs import Ended, Gate, Pulse
from celery_tzbeat.testing import ManualClock, MemoryRuns, MemoryStore
from celery_tzbeat.testing.server import LocalServer

STEPS = 100
TOKENS = ("a", "b", "c")
ORDERS = ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0))
ENDS = (
    "retry",
    "retry",
    "abandoned",
    "abandoned",
    "dead",
    "dead",
    "revoked",
    "expired",
    "done",
    "given_back",
    "given_back",
)
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"on_abandoned": "dead_letter"},
    {"max_deliveries": 2},
    {"delivery": "at_most_once"},
    {"overlap": "buffer_one"},
    {"overlap": "cancel_other"},
)


def script(rng: random.Random, policy: dict[str, Any]) -> list[Callable[[Scene], Any]]:
    """Return random steps, each to be taken by both scenes."""
    steps: list[Callable[[Scene], Any]] = []
    for _ in range(STEPS):
        token, order, end = rng.choice(TOKENS), rng.choice(ORDERS), rng.choice(ENDS)
        unstarted, late, ahead = rng.random() < 0.2, rng.random() < 0.7, rng.randint(1, 3)
        choices: list[tuple[int, Callable[[Scene], Any]]] = [
            (8, lambda s, t=token, o=order, k=late: s.start(t, o, late=k, **policy)),
            (5, lambda s, t=token, o=order, k=late: s.beat(t, o, late=k, **policy)),
            (5, lambda s, t=token, o=order, e=end, u=unstarted: _end(s, "" if u else t, o, e, policy)),
            (4, lambda s: _anew(s)),
            (2, lambda s: s.publish(**policy)),
            (2, lambda s: s.claim(**policy)),
            (2, lambda s: s.confirm()),
            (2, lambda s: _lapse(s)),
            (2, lambda s: _by_run(s, lambda run: s.store.redispatch(run, b"again", epoch=1))),
            (1, lambda s: _by_run(s, lambda run: s.store.settle_run(run, "lost", "late", epoch=1))),
            (1, lambda s: s.store.cancel(s.ask("cancel"), s.occurrence().key, epoch=1)),
            (1, lambda s, o=order: s.store.replay(
                s.ask("replay"), s.claimed(), b"anew", policy=Policy(**policy), dispatch=o[0], epoch=1
            )),
            (1, lambda s, t=token: s.runs.checkpoint(s.occurrence().key, t, b"state")),
        ]  # fmt: skip
        if policy.get("overlap"):
            choices.append((2, lambda s, n=ahead: s.hold(n, **policy)))
        steps += rng.choices([step for _, step in choices], [weight for weight, _ in choices])
    return steps


def _end(scene: Scene, token: str, order: tuple[int, int], state: Any, policy: dict[str, Any]) -> Any:
    if not token and state not in ("expired", "revoked", "dead"):
        return None
    return scene.end(state, token, order, letter=scene.letter() if state == "dead" else "", **policy)


def _anew(scene: Scene) -> str:
    """Forget what was settled, as after a long time, so that there is something to start."""
    scene.forget_marks()
    scene.store.forget(["e"], epoch=1)
    return "anew"


def _lapse(scene: Scene) -> Any:
    scene.let_pass(MOMENT)
    return _by_run(scene, lambda run: scene.store.abandon(run, epoch=1))


def _by_run(scene: Scene, do: Callable[[Any], Any]) -> Any:
    found = [run for run in scene.store.runs() if run.key == scene.occurrence().key]
    return do(found[0]) if found else None


def standing(scene: Scene) -> Any:
    """What the ledger holds, without times."""
    runs = {
        run.key.removeprefix("e@"): (run.state, run.token, run.order, run.starts, run.deliveries, run.acks_late,
                                     run.cancelled, run.payload, run.policy, run.unrun)
        for run in scene.store.runs()
    }  # fmt: skip
    offset = {key.replace(scene.now.isoformat()[:19], ""): value for key, value in runs.items()}
    last = scene.store.last().get("e")
    return (
        sorted(map(repr, offset.values())),
        scene.events,
        len(scene.store.dead_letters()),
        last and last[1],
        len(scene.store.open_occurrences()),
    )


@pytest.fixture
def pair(empty_server: LocalServer) -> Iterator[tuple[Scene, Scene]]:
    clock = ManualClock(datetime(2026, 11, 30, 12, tzinfo=timezone.utc))
    memory = MemoryStore(clock)
    memory.take_office(1)
    in_memory = Scene(
        memory,
        MemoryRuns(memory),
        clock.now(),
        lambda span: clock.advance(span.total_seconds() + 0.001),
        memory.wipe,
        lambda: memory.data.done.clear(),
    )
    on_server = scene_on(empty_server.url)
    yield in_memory, on_server
    on_server.store.close()
    on_server.runs.close()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(map(str, policy.values())) or "default")
@pytest.mark.parametrize("seed", [0, 1, 6])
def test_both_ledgers_answer_any_sequence_alike(pair: tuple[Scene, Scene], seed: int, policy: dict[str, Any]) -> None:
    policy = {**policy, **SHORT}
    done, trail = False, []
    for number, step in enumerate(script(random.Random(seed), policy)):
        answers = [step(scene) for scene in pair]
        trail.append(answers[0])
        assert answers[0] == answers[1], (number, trail)
        assert standing(pair[0]) == standing(pair[1]), (number, trail)
        if done:
            assert getattr(answers[0], "gate", None) is not Gate.WON, trail
            assert answers[0] is not Pulse.RESUMED, trail
        done = (done and answers[0] != "anew") or (answers[0] is Ended.DONE and pair[0].events[-1] == "done")

"""Paused entries in the ledger: one suite for both stores."""

from __future__ import annotations

from datetime import timedelta

from scenes import SECOND, Scene

from celery_tzbeat.model import Pause
from celery_tzbeat.store.protocol import Request, Verdict


def a_pause(scene: Scene, note: str = "for a test") -> Pause:
    at = scene.now.replace(microsecond=0)
    return Pause(at, at + 100 * SECOND, "somebody", note)


def asked(scene: Scene, kind: str) -> Request:
    request = scene.ask(kind, "e")  # type: ignore[arg-type]
    assert request.key == "e"
    return request


def paused(scene: Scene) -> dict[str, Pause]:
    office = scene.store.take_office(1)
    assert office is not None
    assert office.paused == scene.store.paused()
    return dict(office.paused)


def test_line_31_a_pause_stands_with_its_request_answered(scene: Scene) -> None:
    assert paused(scene) == {}
    request = asked(scene, "pause")
    assert scene.store.pause("e", a_pause(scene), request, epoch=1).verdict is Verdict.DONE
    assert scene.store.pause("e", a_pause(scene, "another"), request, epoch=1).verdict is Verdict.DECIDED
    assert paused(scene) == {"e": a_pause(scene)}
    assert scene.store.outcome(request.id) == "paused"
    record = scene.store.audit()[-1]
    assert (record.event, record.entry, record.detail) == ("paused", "e", a_pause(scene).words)


def test_line_31_a_later_pause_takes_its_place_and_one_written_back_needs_no_request(scene: Scene) -> None:
    scene.store.pause("e", a_pause(scene), asked(scene, "pause"), epoch=1)
    assert scene.store.pause("e", a_pause(scene, "another"), None, epoch=1).verdict is Verdict.DONE
    assert paused(scene)["e"].note == "another"


def test_line_31_an_unpause_needs_a_pause(scene: Scene) -> None:
    request = asked(scene, "unpause")
    assert scene.store.unpause("e", request, epoch=1).verdict is Verdict.DECIDED
    assert scene.store.survey().requests == (request,)
    scene.store.pause("e", a_pause(scene), None, epoch=1)
    assert scene.store.unpause("e", request, epoch=1).verdict is Verdict.DONE
    assert scene.store.unpause("e", request, epoch=1).verdict is Verdict.DECIDED
    assert paused(scene) == {}
    assert scene.store.outcome(request.id) == "unpaused"
    assert (scene.store.audit()[-1].event, scene.store.audit()[-1].detail) == ("unpaused", "somebody: for a test")


def test_line_31_open_occurrences_are_not_touched(scene: Scene) -> None:
    scene.publish()
    scene.store.pause("e", a_pause(scene), None, epoch=1)
    assert scene.state == "published"
    assert scene.start().gate.name == "WON"


def test_only_the_leader_in_office_pauses(scene: Scene) -> None:
    scene.store.take_office(2)
    assert scene.store.pause("e", a_pause(scene), None, epoch=1).verdict is Verdict.STALE
    assert scene.store.unpause("e", None, epoch=1).verdict is Verdict.STALE
    scene.wipe()
    assert scene.store.pause("e", a_pause(scene), None, epoch=2).verdict is Verdict.WIPED
    assert scene.store.unpause("e", None, epoch=2).verdict is Verdict.WIPED


def test_the_pause_of_a_forgotten_entry_goes(scene: Scene) -> None:
    scene.store.pause("e", a_pause(scene), None, epoch=1)
    scene.store.forget(["e"], epoch=1)
    assert scene.store.paused() == {}


def test_a_request_says_until_when(scene: Scene) -> None:
    request = Request("pause", "e", "somebody", "", scene.now + timedelta(hours=1), detail="2026-12-24T00:00:00Z")
    scene.store.ask(request)
    (found,) = scene.store.survey().requests
    assert found.detail == "2026-12-24T00:00:00Z"

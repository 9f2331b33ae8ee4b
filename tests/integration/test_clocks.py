"""Hosts whose clock is wrong: they do not lead, they say so, and nothing is sent before its time."""

from __future__ import annotations

import time
from typing import Any

from evidence import PULSE, assert_gapless, audit, faked_clock, lateness, nominals, presence, terms

from celery_tzbeat.testing.processes import wait_until

HOUR, DAY = 3600, 86_400


def test_beside_a_beat_a_day_ahead_the_healthy_one_leads_and_nothing_is_early(project: Any) -> None:
    hourly = {"hourly": {"task": "proj.record", "schedule": 3600}}
    project.write(beat_schedule={**PULSE, **hourly})
    ahead = project.start_beat(env=faked_clock(f"+{DAY}"))
    wait_until(lambda: (p := presence(project.url, ahead)) and "86400 s ahead of" in p.why, 40, "it to say so")
    healthy = project.start_beat()
    healthy.wait_for_log("leads with epoch", 40)
    wait_until(lambda: len(nominals(project.url)) >= 5, 20, "pulses")
    found = presence(project.url, ahead)
    assert found is not None
    assert found.role == "standby"
    assert abs(found.skew - DAY) < 5
    assert "tzbeat_max_skew (300 s)" in found.why
    ahead.wait_for_log("86400 s ahead of", 10)
    assert terms(ahead) == 0

    # Not even when nobody else is left.
    assert healthy.stop() == 0
    seen = len(nominals(project.url))
    time.sleep(4)
    assert len(nominals(project.url)) == seen
    assert terms(ahead) == 0
    assert min(lateness(project.url)) >= 0
    assert_gapless(nominals(project.url))


def test_while_all_clocks_are_wrong_nobody_leads_and_afterwards_what_was_due_is_made_good(project: Any) -> None:
    # The server's clock cannot be set: that all beats are an hour off is the same to them.
    project.write(beat_schedule=PULSE)
    beat = project.start_beat()
    wait_until(lambda: len(nominals(project.url)) >= 2, 40, "pulses")
    beat.kill()
    seen = len(nominals(project.url))
    wrong = [project.start_beat(env=faked_clock(f"{sign}{HOUR}")) for sign in "+-"]
    for beat, side in zip(wrong, ("ahead of", "behind"), strict=True):
        words = f"3600 s {side}"
        wait_until(
            lambda beat=beat, words=words: (p := presence(project.url, beat)) and words in p.why, 40, "it to say so"
        )
    time.sleep(4)
    assert len(nominals(project.url)) == seen
    assert [terms(beat) for beat in wrong] == [0, 0]
    for beat in wrong:
        assert beat.stop() == 0

    healthy = project.start_beat()
    healthy.wait_for_log("leads with epoch", 40)
    wait_until(lambda: nominals(project.url)[-1].timestamp() > time.time() - 2, 20, "the beat to catch up")
    assert_gapless(nominals(project.url))
    assert min(lateness(project.url)) >= 0
    assert not audit(project.url, "coalesced")

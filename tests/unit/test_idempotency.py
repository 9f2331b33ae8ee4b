from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_tzbeat import InvalidPolicy, idempotent
from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.model import Policy, Retry


def ticket(key: str, **options: Any) -> Ticket:
    found = Ticket.from_headers(idempotent(key, **options))
    assert found is not None
    return found


def test_a_message_with_the_headers_carries_a_ticket_of_its_key() -> None:
    app = Celery("proj", broker="memory://idempotent", set_as_current=False)
    app.send_task("proj.charge", headers={**idempotent("order-42"), "mine": 1})
    with app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
        message = queue.get(timeout=5)
    found = Ticket.from_headers(message.headers)
    assert found == ticket("order-42")
    assert message.headers["mine"] == 1
    assert (found.key, found.entry, found.nominal, found.namespace, found.dispatch) == ("order-42", "", None, "", 1)
    assert found.occurrence is None


def test_the_place_of_the_mark_is_the_keys_own_and_the_same_for_every_caller() -> None:
    places = {(found.number, found.field) for found in map(ticket, (f"order-{n}" for n in range(1000)))}
    assert len(places) == 1000
    assert all(0 <= part < 2**53 for place in places for part in place)
    assert (ticket("order-42").number, ticket("order-42").field) == (2110058023912561, 8081175530542339)


def test_a_policy_travels() -> None:
    found = ticket("order-42", policy={"retry": 4, "timeout": 30})
    assert found.policy == Policy(retry=Retry(max_attempts=4), timeout=timedelta(seconds=30))
    with pytest.raises(InvalidPolicy, match="'retri' is unknown"):
        idempotent("order-42", policy={"retri": 4})


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb", "half \ud800", 42, None])
def test_what_is_no_key_is_refused(key: Any) -> None:
    with pytest.raises(ValueError, match="a printable text of 1 to 255 characters"):
        idempotent(key)


@pytest.mark.parametrize(
    "key", ["nightly@2026-11-01T05:30:00Z", "e@2026-11-01T05:30:00.5Z", "e@2026-11-01T05:30:00Z#manual-7"]
)
def test_the_key_of_an_occurrence_is_taken(key: str) -> None:
    with pytest.raises(ValueError, match="add a word to it"):
        idempotent(key)
    assert ticket(f"{key} mail").key == f"{key} mail"

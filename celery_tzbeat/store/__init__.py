"""WHAT WAS DECIDED: the ledger, and the only room that knows Redis' commands (with the leases and the capture channel)."""

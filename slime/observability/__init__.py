"""Observability room: metrics, debug dumps and timers. Changes nothing that is trained; imports only `slime.utils`."""

"""The GPU side of tokenmq: one consumer process per card.

    feed (route, token budget) ─► engine host (child process) ─► settle
          heartbeat thread beside them, which a busy engine cannot starve

`engine` says what an engine is, `engines/` holds one module per engine, `host` is the child that
owns it, `supervision` the parent's side of that child. `feed` and `suspects` decide and do no I/O;
`service` is the dull shell that carries their decisions out.
"""

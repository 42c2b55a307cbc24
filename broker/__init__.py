"""The contract between all parts of tokenmq, and the control plane.

    contract        wire, geometry, prefix, settings, errors, store (the only room that speaks
    Redis) control plane   service (the loops), router, recovery, planner
    on one machine  redis_server, state_folder, leash, cli

Words, one meaning each: a *job* is one bulk run, a *task* one prompt to generate, an *entry* a task
as a stream entry, a *delivery* an entry handed to a consumer; *pending* is delivered and not
acknowledged, *in flight* is pending and given to the engine, *backlog* is not settled. A *bucket*
is a range of prompt lengths, a *slot* a residue of the prefix hash, a *partition* the pair. A
*route* is the ordered partitions of one consumer, a *plan* all routes. To *dwell* is to drain one
partition before the next, to *steal* is to work on another's route, to *settle* is to end a
delivery; *superseded* is an end that came too late. An *orphan* is a pending entry of a dead
consumer, a *dead letter* a task set aside. *token* is always an LLM token.

The broker knows neither consumers nor producers; they import it, never each other.
"""

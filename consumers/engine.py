"""What an engine is: the contract between the engine host and every engine.

An engine lives in the host process, a child of the consumer, and may therefore crash or hang
without taking anything else along. It is fed batches of `Generation` and hands back batches of
`Completion`, one for each generation, in any order. It never speaks Redis and knows no task.

    consumer ──frames──► host loop ──submit──► engine
             ◄─frames──            ◄──emit───

`Generation` and `Completion` are tuples, so that a batch crosses the process border as one
MessagePack frame without a per-field cost. A prompt that cannot run comes back as a completion
with an `error_code`; no engine drops one silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Generation(NamedTuple):
    """One prompt for the engine. Exactly one of `prompt`, `messages`, `token_ids` is not None."""

    number: int  # unique within the life of a consumer process
    prompt: str | None
    messages: list[dict[str, Any]] | None  # OpenAI chat form; the engine applies its chat template
    token_ids: list[int] | None
    max_tokens: int  # output tokens, at least 1
    temperature: float  # 0 is greedy
    top_p: float
    top_k: int  # 0 is off
    seed: int
    stop: list[str]
    ignore_eos: bool


class Completion(NamedTuple):
    """The end of one generation. Token counts are tokens of this engine's own tokenizer."""

    number: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" | "length" | "aborted" | "error"
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were served from the prefix cache
    output_tokens: int
    generate_ms: float  # from submit to the last token
    error_code: str  # "" when finish_reason is not "error"
    error_text: str


class Capacity(NamedTuple):
    """What the engine can hold, known once it has started."""

    max_seq_len: int  # prompt plus output tokens of one generation
    kv_tokens: int  # tokens of KV cache
    max_batch: int  # generations that run at once
    description: str  # engine, version, model, arithmetic: for people and captures


class EngineStats(NamedTuple):
    """A reading of the engine; counters are cumulative since its start."""

    steps: int  # grows whenever the engine makes progress; the watchdog looks at it
    running: int
    waiting: int  # submitted, not yet scheduled
    kv_used: float  # share 0..1
    prompt_tokens: int  # prompt tokens of scheduled generations, cached ones included
    cached_tokens: int
    output_tokens: int


Emit = Callable[[Sequence[Completion]], None]


class Engine(Protocol):
    """Implemented by one module per engine in `consumers.engines`. Called from one thread only."""

    async def start(self, emit: Emit) -> Capacity:
        """Load the model. Raises EngineUnavailable with one clear line when that cannot be done."""

    def submit(self, generations: Sequence[Generation]) -> None:
        """Take a batch; never blocks and never raises for a single bad prompt."""

    def abort(self, numbers: Sequence[int]) -> None:
        """End these early with finish_reason "aborted"; unknown numbers are ignored."""

    def release(self) -> list[int]:
        """Hand back the numbers of what has not started; those get no completion (drain)."""

    async def run(self) -> None:
        """Work until closed; yields to the event loop at least once per engine step."""

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Release what start took. Not called after a crash: the parent kills the process group."""

"""Every error a user can meet. Each message says what was wrong, where, and what to do about it."""


class Ds4jaxError(Exception):
    """Base of all errors raised on purpose by ds4jax."""


# ---------------------------------------------------------------- model files
class ModelFileError(Ds4jaxError):
    """The weights file cannot be used: missing, truncated, not GGUF, or an unknown tensor type."""


class ConfigError(Ds4jaxError):
    """A metadata key or an option is missing or has an impossible value; the message names it, what was got and what was expected."""


class BindingError(Ds4jaxError):
    """Tensors of a file and leaves of the model do not match one to one; the message lists both sides."""


class TokenizerError(Ds4jaxError):
    """The vocabulary in the file cannot be used, or a token id is out of range."""


# ---------------------------------------------------------------- start-up
class BackendMismatchError(Ds4jaxError):
    """`model-backend mismatch`: the device that was asked for is not there."""

    def __init__(self, wanted: str, found: str) -> None:
        super().__init__(
            f"model-backend mismatch: {wanted} was asked for, but this machine has {found}. "
            "Choose one of those with --backend, or install the jax extra for your device (ds4jax[cuda12] or ds4jax[cuda13])."
        )


class MemoryPlanError(Ds4jaxError):
    """Weights and cache do not fit the device; the message says how many slots or how much context would."""


# ---------------------------------------------------------------- requests
class RequestError(Ds4jaxError):
    """A request cannot be accepted as it is. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """Prompt and completion do not fit the context of a slot.

    Args:
        n_ctx: tokens a slot holds.
        n_prompt: tokens of the prompt.
        n_completion: tokens asked for, or None when the request named no maximum (then one is counted).
        param: the request field that holds the prompt.
        at_least: n_prompt is a lower bound; the prompt was refused unencoded.
    """

    def __init__(self, n_ctx: int, n_prompt: int, n_completion: int | None, param: str = "messages", *, at_least: bool = False) -> None:
        completion = 1 if n_completion is None else n_completion
        bound = "at least " * at_least
        super().__init__(
            f"This model's maximum context length is {n_ctx} tokens. However, you requested {bound}{n_prompt + completion} tokens "
            f"({bound}{n_prompt} in the {param}, {completion} in the completion). Please reduce the length of the {param} or completion.",
            param,
        )
        self.n_ctx, self.n_prompt, self.n_completion = n_ctx, n_prompt, completion


class GrammarError(Ds4jaxError):
    """A text cannot go on under the grammar it has to follow, for a step of it would cost too much."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the grammar of this request is too complex to be followed further ({reason}); simplify it")
        self.reason = reason


class QueueFullError(Ds4jaxError):
    """All slots are busy and the queue is at its limit. `retry_after_s` is a hint for the client.

    n_most: requests that slots and queue hold at the best of times, where that is known.
    """

    def __init__(self, n_waiting: int, retry_after_s: int = 1, *, n_most: int | None = None) -> None:
        super().__init__(
            f"the server is busy: {n_waiting} requests are waiting already. Retry after {retry_after_s} s, or raise --queue-limit."
        )
        self.n_waiting, self.retry_after_s, self.n_most = n_waiting, retry_after_s, n_most


class EngineStoppedError(Ds4jaxError):
    """The engine was closed or its thread has died; nothing more can be submitted."""


# ---------------------------------------------------------------- steps
class DecodeInFlightError(Ds4jaxError):
    """A second decode was asked of a session whose first has not returned."""

    def __init__(self) -> None:
        super().__init__("session already has a decode in flight")


class DecodeFailedError(Ds4jaxError):
    """The device failed during a step; the sessions of that batch end and their slots are cleared."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"batched decode failed: {cause}")


class StaleCacheError(Ds4jaxError):
    """A cache that a step had consumed (donated) was used again.

    Args:
        step: name of the step that consumed it.
    """

    def __init__(self, step: str) -> None:
        super().__init__(f"this cache was consumed by {step}; use the cache which that step returned")

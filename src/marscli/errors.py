"""The exceptions that users see as a message and a hint, without a traceback."""


class MarsError(Exception):
    """A failure that the user can act on, found while a run is under way.

    Args:
        message: What is wrong; names the option, file or line at fault.
        hint: What to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(MarsError):
    """Wrong usage or wrong input, found before any model is loaded."""

    exit_code = 2

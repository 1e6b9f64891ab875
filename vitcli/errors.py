"""The error that a user can cause, and nothing else."""


class VitcliError(Exception):
    """Something the user can put right: one line of what went wrong, one of what to do next.

    `exit_code` is 2 for usage or bad input and 1 for a run that failed.
    """

    def __init__(self, message: str, hint: str = "", *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

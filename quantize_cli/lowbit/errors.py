"""What can go wrong because of the input, one line each.

Every message names the file, tensor or flag and says what to do; the command line prints it and exits with
`exit_code`. Anything that is not a LowbitError is a bug of ours and shows its traceback.
"""


class LowbitError(Exception):
    """Bad input or usage: exit code 2."""

    exit_code = 2


class SourceError(LowbitError):
    """A model folder, file or tensor that cannot be read as it is."""


class RecipeError(LowbitError):
    """A flag or recipe key that is unknown, malformed or contradicts another one."""


class PlanError(LowbitError):
    """A layer that cannot be quantized as asked; found before any weight is read."""


class CalibrationError(LowbitError):
    """Calibration text that is missing, empty or too short."""


class OutputError(LowbitError):
    """An output folder that exists, is the source, cannot be written or has no room."""


class HubError(LowbitError):
    """The Hugging Face Hub refused or could not be reached."""


class GateError(LowbitError):
    """A quality gate or a verification failed: exit code 1."""

    exit_code = 1


def one_line(said: object, most: int | None = 200) -> str:
    """What another library said, or any text, on one line of at most so many characters."""
    return " ".join(str(said).split())[:most]

"""The form in which OpenAI's API says what is wrong."""

from typing import Any


def error(
    message: str, type: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of a response that says an error."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}

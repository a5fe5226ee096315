"""What every body of a POST has in common: read strictly, checked, and made a request of."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class RequestBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def check_fields(self) -> None:
        """Raises InvalidRequest naming a field that is unknown or asks for what is not there."""
        raise NotImplementedError

    def to_request(self) -> Any:
        """In the router's own terms; raises InvalidRequest."""
        raise NotImplementedError

    def without_prompt(self) -> Self:
        """All else that it asks for; the prompt may be large."""
        raise NotImplementedError

"""What request bodies have in common: no value is bent into another type. Used by the schemas."""

from typing import Annotated, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast

T = TypeVar("T")


class _FailFast(FailFast):
    """Python 3.11 wants parts of unions hashable."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


#: One error is enough: millions of wrong items would cost far more than the body itself.
Items: TypeAlias = Annotated[list[T], _FailFast()]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
